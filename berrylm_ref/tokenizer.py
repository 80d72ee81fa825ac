"""A byte-level BPE tokenizer (tokenizers.json of the ``tokenizers`` library) with the raw bytes of every token."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel


class Tokenizer:
    """Text <-> ids. Byte-level only: a token is a fixed string of bytes, so a sequence decodes to their concatenation."""

    def __init__(self, path: str | Path):
        try:
            self.fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any damage
            raise ValueError(f"Tokenizer: {path}: expected a tokenizer.json, got {error}") from error
        decoder = json.loads(self.fast.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ValueError(f"Tokenizer: {path}: expected a byte-level decoder, got {decoder.get('type')}")
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        tags = sorted((token.content for token in added.values()), key=len, reverse=True)
        self.added_pattern = re.compile("|".join(map(re.escape, tags)) or "(?!)")  # text that `encode` takes for one token
        table = byte_table()
        self.token_bytes: dict[int, bytes] = {}
        for text, i in self.fast.get_vocab(with_added_tokens=True).items():
            if i not in added and not table.keys() >= set(text):
                raise ValueError(f"Tokenizer: {path}: expected tokens in the byte alphabet, got {text!r}")
            self.token_bytes[i] = text.encode() if i in added else bytes(table[c] for c in text)
        self.size = max(self.token_bytes, default=-1) + 1

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """The folder's tokenizer.json, or None: a folder without one works with token ids."""
        path = Path(folder) / "tokenizer.json"
        return cls(path) if path.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; tags written in it become their own tokens, nothing is added.

        The library's batch call, for one text: it lets other threads run meanwhile, and it looks for no offsets.
        """
        return self.fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of(i) for i in ids if not (skip_special and i in self.special_ids)).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The raw bytes of one token; none for an id that the tokenizer does not know."""
        return self.token_bytes.get(token, b"")


def byte_table() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this maps them back.

    The library publishes the alphabet but not its order: printable Latin-1 bytes stand for themselves, the others follow
    from U+0100 on, in order.
    """
    table = {chr(b): b for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    rest = [b for b in range(256) if chr(b) not in table]
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    if set(table) != set(ByteLevel.alphabet()):
        raise ValueError("Tokenizer: the tokenizers library changed its byte alphabet")
    return table
