"""Small checkpoints for the tests of caches, engine and server: two layers, one of each kind, written once a session."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from helpers import randomise, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from berrylm_ref import LLM, BerryLM

VOCAB = 97


@cache
def checkpoint(with_tokenizer: bool = False) -> Path:
    """Folder of a two-layer model: one linear layer, one full, random weights away from their trivial values."""
    folder = Path(mkdtemp(prefix="berrylm-test-"))
    vocab = 300 if with_tokenizer else VOCAB
    config = tiny_config(num_hidden_layers=2, vocab_size=vocab, attn_res_block_size=1, max_position_embeddings=16384)
    randomise(BerryLM(config), seed=11).save_pretrained(folder)
    if with_tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token a byte and a few special ones: 260 ids, fewer than the model's 300 rows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>", "<user>"])
    fast.add_tokens(["<think>", "</think>"])
    return fast


def small_llm(**options) -> LLM:
    """The fp64 engine on the two-layer model: in fp32 router near-ties flip and look like bugs."""
    options = {"dtype": "float64", "max_total_tokens": 4096, "snapshot_bytes": 2**22, **options}
    return LLM(checkpoint(options.pop("with_tokenizer", False)), **options)


def arrive(engine, requests: list, steps: int) -> None:
    """Add one of ``requests`` after the other, ``steps`` steps apart, and run them to their ends."""
    for request in requests:
        engine.add(request)
        for _ in range(steps):
            engine.step()
    while not engine.idle:
        engine.step()
