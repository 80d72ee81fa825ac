"""The shipped tokenizer: rebuilt byte for byte, exactly as many ids as the model has rows, exact round trips."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berrylm_ref.tokenizer import Tokenizer
from berrylm_ref.training.tokenizer_build import COUNTS, NANO, SPECIAL, TAGS, VOCAB, build, count_words

TOKENIZER = Tokenizer.from_folder(NANO)


def test_rebuilt_byte_for_byte(tmp_path):
    """A tokenizer that nobody can make again can't be trusted: the committed counts give the committed file."""
    build(json.loads(COUNTS.read_text(encoding="utf-8"))).save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == (NANO / "tokenizer.json").read_bytes()


def test_counting_is_seeded():
    """The same seed counts the same words."""
    small, again, other = (count_words(samples=200, seed=seed) for seed in (0, 0, 1))
    assert small == again != other


def test_exactly_as_many_ids_as_rows():
    """CKPT-3: a row without a token can be sampled, a token without a row can't be read."""
    assert TOKENIZER.size == VOCAB == len(TOKENIZER.token_bytes) == 4096
    assert sorted(TOKENIZER.token_bytes) == list(range(VOCAB))


def test_too_few_words_are_refused():
    with pytest.raises(ValueError, match="build: counts: expected words enough for 4096 tokens, got"):
        build({"word": 5})


def test_control_tokens_are_one_id_each_and_only_roles_are_hidden():
    """The parsers read `<think>` and `<tool_call>` from the detokenizer's text, so these must not be hidden."""
    for text in SPECIAL + TAGS:
        (token,) = TOKENIZER.encode(text)
        assert (token in TOKENIZER.special_ids) == (text in SPECIAL)
        assert TOKENIZER.decode([token]) == ("" if text in SPECIAL else text)
        assert TOKENIZER.encode(f"a {text} b") == TOKENIZER.encode("a ") + [token] + TOKENIZER.encode(" b")


def test_every_digit_is_one_token_and_so_is_a_line_break():
    """A number with two spellings would need two tables; a break that merges would change ids at the end of a prompt."""
    for text in ("10000", "487+365:7+5=12 8+6->852", " 3.5", "0", "\n\n\n", "a\n\nb", "x2y3"):
        singles = [i for i in TOKENIZER.encode(text) if any(c in b"0123456789\n" for c in TOKENIZER.bytes_of(i))]
        assert [len(TOKENIZER.bytes_of(i)) for i in singles] == [1] * sum(c in "0123456789\n" for c in text)
    merged = [t for t in TOKENIZER.token_bytes.values() if len(t) > 1 and any(c in b"0123456789\n" for c in t)]
    assert merged == []


def test_all_bytes_are_known():
    assert {TOKENIZER.bytes_of(i) for i in range(VOCAB)} >= {bytes([b]) for b in range(256)}


@settings(max_examples=500, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.text(" \n\t\r0a<|é漢🫐", max_size=20))
def test_any_text_survives_exactly(text):
    """Spaces and line breaks too: indentation is part of an argument."""
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


def test_words_of_the_data_are_one_token():
    """Compact samples are what the vocabulary is for."""
    for text in (" apples", " Mira", " dollars", "The", " answer", " calculator", "->", '":{"', "description"):
        assert len(TOKENIZER.encode(text)) == 1, text
