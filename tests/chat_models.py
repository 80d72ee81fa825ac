"""Models that chat: the two-layer model with a chat tokenizer and the shipped template, and one that says a given text."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from helpers import randomise, tiny_config
from models import byte_tokenizer

import berrylm_ref
from berrylm_ref import LLM, BerryLM
from berrylm_ref.engine import engine
from berrylm_ref.engine.sampler import choice_seed

TEMPLATE = Path(berrylm_ref.__file__).parent / "checkpoints" / "nano" / "chat_template.jinja"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TAGS = ["<tool_call>", "</tool_call>"]


@cache
def chat_checkpoint() -> Path:
    """Folder of a two-layer model with random weights, a token a byte and a token a tag, and the shipped template."""
    folder = Path(mkdtemp(prefix="berrylm-chat-test-"))
    config = tiny_config(num_hidden_layers=2, vocab_size=300, attn_res_block_size=1, max_position_embeddings=16384)
    randomise(BerryLM(config), seed=11).save_pretrained(folder)
    fast = byte_tokenizer()
    fast.add_special_tokens(ROLES)
    fast.add_tokens(TAGS)  # not special: a special token is hidden from the text
    fast.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    end = fast.token_to_id("<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "temperature": 0.7, "top_k": 20}))
    return folder


def chat_llm(**options) -> LLM:
    return LLM(chat_checkpoint(), **{"dtype": "float64", "max_total_tokens": 8192, "snapshot_bytes": 2**22, **options})


class Scripted:
    """The real engine and model, but the sampler's scores are raised for the next token of a text; a context manager.

    ``says``: the text of a turn, or a list of one a choice (then the request needs a seed); an end token follows it. Where a
    constraint forbids the next token the model's own logits decide. Log-probabilities are the model's own.
    """

    def __init__(self, **options):
        self.llm = chat_llm(**options)
        self.says: str | list[str] | None = None
        self._sample = engine.sample

    def __enter__(self):
        engine.sample = self._raised
        return self

    def __exit__(self, *_):
        engine.sample = self._sample

    def _raised(self, logits, rows, known=None):
        logits = logits.clone()
        for scores, row in zip(logits, rows, strict=True):
            if self.says is not None:
                script = [*self.llm.tokenizer.encode(self._text(row)), *self.llm.end_ids]
                at = min(len(row.output_ids) + row.ahead, len(script) - 1)
                scores[script[at]] += 1000.0
        return self._sample(logits, rows, known)

    def _text(self, row):
        if isinstance(self.says, str):
            return self.says
        return next(text for i, text in enumerate(self.says) if choice_seed(row.params.seed, i) == row.seed)
