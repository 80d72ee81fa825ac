"""Text that streams: joined, the pieces are the decode of the whole; nothing is sent that would have to be taken back."""

import itertools

import pytest
from models import byte_tokenizer, checkpoint

from berrylm_ref.engine.detokenizer import Detokenizer, StopStrings
from berrylm_ref.tokenizer import Tokenizer, byte_table


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(checkpoint(with_tokenizer=True) / "tokenizer.json")


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


def test_characters_split_over_tokens_come_whole(tokenizer):
    """API-5: one byte a token; decoding each alone gives U+FFFD for emoji and CJK."""
    text = "🫐é漢 ok"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids) and "�" not in "".join(pieces)
    assert [p for p in pieces if p] == list(text), "each character comes with its last byte, not later"


def test_a_text_that_ends_mid_character_has_one_replacement_at_the_end(tokenizer):
    """API-5: end the stream after the first two bytes of 🫐."""
    ids = tokenizer.encode("a🫐")[:3]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "a�" == tokenizer.decode(ids) and pieces[-1] == "�"


def test_every_pair_of_bytes_streams_as_it_decodes(tokenizer):
    """Invalid UTF-8 too: the streamed and the whole decode must agree on where a U+FFFD stands."""
    for a, b in itertools.product((0x41, 0x80, 0xC3, 0xE6, 0xF0, 0xFF), repeat=2):
        ids = [tokenizer.fast.token_to_id({v: k for k, v in byte_table().items()}[x]) for x in (a, b, 0x42)]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_are_hidden_and_tags_are_not(tokenizer):
    """Roles and the end token are not text; the think tags must reach the parsers."""
    ids = tokenizer.encode("<user>a<think>b</think><eos>")
    assert "".join(pieces_of(tokenizer, ids)) == "a<think>b</think>"
    assert tokenizer.decode(ids, skip_special=False) == "<user>a<think>b</think><eos>"


def test_ids_that_the_tokenizer_does_not_know_are_no_text(tokenizer):
    """CKPT-3: the model has more rows than the tokenizer has entries."""
    assert tokenizer.size == 260 and tokenizer.decode([65, 299]) == tokenizer.decode([65])


def test_whitespace_is_never_lost(tokenizer):
    text = "  two\n\n three  \t"
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text))) == text


def test_damaged_and_foreign_tokenizer_files_are_refused(tmp_path):
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="expected a tokenizer.json"):
        Tokenizer(broken)
    fast = byte_tokenizer()
    fast.decoder = None
    fast.save(str(broken))
    with pytest.raises(ValueError, match="expected a byte-level decoder, got None"):
        Tokenizer(broken)
    text = byte_tokenizer().to_str()
    broken.write_text(text.replace('"A":', '"A b":'))
    with pytest.raises(ValueError, match="expected tokens in the byte alphabet, got 'A b'"):
        Tokenizer(broken)


def cuts(text):
    """The whole, its characters, and every cut into two or three."""
    yield [text]
    yield list(text)
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            yield [text[:i], text[i:j], text[j:]]


@pytest.mark.parametrize(
    "text,stops,kept,stopped",
    [
        ("The quick brown fox", ("own fox",), "The quick br", True),
        ("aaaab", ("aab",), "aa", True),
        ("brown fo", ("own fox",), "brown fo", False),
        ("one END two", ("END", "END two"), "one ", True),
        ("one END two", ("END two", "END"), "one ", True),
        ("xabcy", ("abc", "bc"), "x", True),
        ("ab", ("abc", "b"), "a", True),
    ],
)
def test_stop_strings_at_every_cut(text, stops, kept, stopped):
    """API-4: a stop that spans pieces; the held tail released at the end; the match that ends first wins."""
    for parts in cuts(text):
        stop = StopStrings(stops)
        got = "".join(map(stop.feed, parts))
        assert stop.stopped == stopped
        assert got + stop.finish() == kept, parts


def test_nothing_is_held_longer_than_a_tail_that_can_still_become_a_stop():
    stop = StopStrings(("own fox",))
    assert [stop.feed(c) for c in "brown fig"] == ["b", "r", "", "", "", "", "", "own fi", "g"]
