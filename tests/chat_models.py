"""Models that chat: the two-layer model with a chat tokenizer and the shipped template, and one that says a given text."""

import json
from collections.abc import Callable
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
    return LLM(chat_checkpoint(), **{"dtype": "float64", "max_total_tokens": 3072, "snapshot_bytes": 2**22, **options})


class Scripted:
    """The real engine and model, but the sampler's scores are raised for the next token of a text; a context manager.

    ``says``: the text of a turn, a list of one a choice (then the request needs a seed), or what gives the text for the
    prompt's text; an end token follows it. Where a constraint forbids the next token the model's own logits decide.
    Log-probabilities are the model's own.
    """

    def __init__(self, **options):
        self.llm = chat_llm(**options)
        self.says: str | list[str] | Callable[[str], str] | None = None
        self._sample = engine.sample

    def __enter__(self):
        engine.sample = self._raised
        return self

    def __exit__(self, *_):
        engine.sample = self._sample

    def tokens(self, text):
        """The ids of a turn of this text, the end token included."""
        return [*self.llm.tokenizer.encode(text), *self.llm.end_ids]

    def _raised(self, logits, rows, known=None):
        logits = logits.clone()
        for scores, row in zip(logits, rows, strict=True):
            if self.says is not None:
                script = self.tokens(self._text(row))
                at = min(len(row.output_ids) + row.ahead, len(script) - 1)
                scores[script[at]] += 1000.0
        return self._sample(logits, rows, known)

    def _text(self, row):
        if isinstance(self.says, str):
            return self.says
        if callable(self.says):
            return self.says(self.llm.tokenizer.decode(row.prompt_ids, skip_special=False))
        return next(text for i, text in enumerate(self.says) if choice_seed(row.params.seed, i) == row.seed)


def joined(chunks):
    """A stream's chunks as the dict of the answer without streaming, ids and times aside; asserts the order of things."""
    chunks = [c.model_dump(exclude_unset=True) for c in chunks]
    choices, usage = {}, None
    for chunk in chunks:
        assert usage is None, "the usage chunk is the last"
        if not chunk["choices"]:
            usage = chunk["usage"]
            continue
        (part,) = chunk["choices"]
        delta = part["delta"]
        if part["index"] not in choices:
            assert delta == {"role": "assistant", "content": None}, "the first chunk has the role and nothing else"
            message = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": []}
            choices[part["index"]] = {"message": message, "logprobs": [], "finish_reason": None}
            continue
        choice = choices[part["index"]]
        message = choice["message"]
        assert choice["finish_reason"] is None, "nothing after the end"
        assert "role" not in delta
        for name in ("content", "reasoning_content"):
            if name in delta:
                assert delta[name], "an empty piece says nothing"
                message[name] = (message[name] or "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls, function = message["tool_calls"], call["function"]
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function" and function["name"]
                calls.append([call["id"], function["name"], ""])
            calls[call["index"]][2] += function["arguments"]
        if part["logprobs"]:
            choice["logprobs"] += part["logprobs"]["content"]
        if part["finish_reason"]:
            assert delta == {}, "the reason comes alone, after all that it ends"
            choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def plain(answer):
    """An answer without streaming in the form of ``joined``."""
    answer = answer.model_dump(exclude_unset=True)
    choices = []
    for i, choice in enumerate(answer["choices"]):
        message = choice["message"]
        calls = message.pop("tool_calls", [])
        message["tool_calls"] = [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in calls]
        assert choice["index"] == i
        logprobs = (choice["logprobs"] or {}).get("content", [])
        choices.append({"message": message, "logprobs": logprobs, "finish_reason": choice["finish_reason"]})
    return {"choices": choices, "usage": answer["usage"]}


def without_ids(answer):
    """``joined`` or ``plain`` without what may differ: the ids of calls, and what the prefix cache held."""
    for choice in answer["choices"]:
        choice["message"]["tool_calls"] = [call[1:] for call in choice["message"]["tool_calls"]]
    usage = answer["usage"]
    return {**answer, "usage": {k: v for k, v in usage.items() if k != "prompt_tokens_details"}}


class Asker:
    """Asks through the real openai client, streaming and not, and asserts that both say the same."""

    def __init__(self, client):
        self.client = client

    def answer(self, content="hi", messages=None, **body):
        body = {"model": "tiny", "messages": messages or [{"role": "user", "content": content}], "seed": 1, **body}
        return self.client.chat.completions.create(**body)

    def both(self, content="hi", **body):
        """The choices: message, logprobs, finish_reason; and the usage."""
        whole = without_ids(plain(self.answer(content, **body)))
        with self.answer(content, stream=True, stream_options={"include_usage": True}, **body) as chunks:
            stream = without_ids(joined(chunks))
        assert stream == whole
        return whole

    def one(self, content="hi", **body):
        """(reasoning, content, calls, reason) of the only choice."""
        (choice,) = self.both(content, **body)["choices"]
        message = choice["message"]
        calls = [tuple(call) for call in message["tool_calls"]]
        return message["reasoning_content"], message["content"], calls, choice["finish_reason"]
