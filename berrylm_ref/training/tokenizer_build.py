"""The tokenizer of the shipped checkpoint: byte-level BPE over the words of the training data and, for what else a reader
may type, of this package's own source.

    python -m berrylm_ref.training.tokenizer_build          rebuild tokenizer.json, byte for byte, from the committed counts
    python -m berrylm_ref.training.tokenizer_build count    count the words anew, then rebuild

The counts are a file of their own so that a change of generators or source leaves the tokens of a trained checkpoint alone.
A digit is one token, so is a line break: no number has two spellings, and where a turn ends never changes how the text
before it is split.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..chat.template import ChatTemplate
from .data import KINDS, conversation

VOCAB = 4096
SPECIAL = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")  # hidden from the reader
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # the parsers of the answer must see these
WORD = r"\p{N}|\n| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|[^\S\n]+(?!\S)|\s"
SEED = 0
SAMPLES = 60_000  # by their share of the data, but of each kind at least one in 200
TOP = 2_000  # the largest count; order and proportion matter, not size
SEEN = 100  # added to every word of the data, so that each becomes one token before any word that is only in the source

HERE = Path(__file__).parent
COUNTS = HERE / "tokenizer_words.json"
NANO = HERE.parent / "checkpoints" / "nano"


def untrained() -> Tokenizer:
    """The tokenizer without merges."""
    fast = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    return fast


def count_words(samples: int = SAMPLES, seed: int = SEED) -> dict[str, int]:
    """How often each word (`WORD`) occurs in generated conversations of all kinds and splits, scaled, and in the source of
    the package; control tokens aside."""
    template = ChatTemplate.from_folder(NANO)
    split = untrained().pre_tokenizer
    counts: Counter[str] = Counter()
    tags = re.compile("|".join(map(re.escape, SPECIAL + TAGS)))
    for kind, share in KINDS.items():
        rng = Random(f"{seed} {kind}")
        for i in range(max(samples // 200, int(samples * share)) // (20 if kind == "retrieval_4k" else 1)):
            made = conversation(kind, rng, ("train", "train", "operands", "templates")[i % 4])
            for text in tags.split(template.render(made.messages, made.tools, add_generation_prompt=False)):
                counts.update(text[start:stop] for _, (start, stop) in split.pre_tokenize_str(text))
    scale = max(counts.values()) / TOP
    words = Counter({word: int(count / scale) + SEEN for word, count in counts.items()})
    for path in sorted(HERE.parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        words.update({text[start:stop]: 1 for _, (start, stop) in split.pre_tokenize_str(text)})
    words = {word: count for word, count in words.items() if len(word) > 1}
    return dict(sorted(words.items(), key=lambda item: (-item[1], item[0])))


def build(counts: Mapping[str, int]) -> Tokenizer:
    """The tokenizer with exactly VOCAB ids: bytes and merges, then the control tokens."""
    fast = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator((word for word, count in counts.items() for _ in range(count)), trainer)
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    if fast.get_vocab_size() != VOCAB:
        raise ValueError(f"build: counts: expected words enough for {VOCAB} tokens, got {fast.get_vocab_size()}")
    return fast


def main() -> None:
    if sys.argv[1:] == ["count"]:
        COUNTS.write_text(json.dumps(count_words(), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    build(json.loads(COUNTS.read_text(encoding="utf-8"))).save(str(NANO / "tokenizer.json"))


if __name__ == "__main__":
    main()
