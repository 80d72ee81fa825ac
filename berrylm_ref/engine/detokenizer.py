"""From token ids to text that can be sent at once: never half a character, never a part of a stop string."""

import codecs

from ..tokenizer import Tokenizer


class Detokenizer:
    """Feeds ids, gives text; joined, the pieces are the decode of the whole sequence. Special tokens are hidden.

    Bytes that may still become a character are held; at the end, what is left of one becomes a single U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        hidden = token in self._tokenizer.special_ids
        return "" if hidden else self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes text through until a stop string; holds back only a tail that can still become one.

    The stop that *ends* first wins, of those the one that starts first; ``stopped`` is set and nothing passes afterwards.
    ``matched`` is that stop.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.stopped = False
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of what came so far that is certainly before any stop."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            end, at = min(ends)
            self.stopped, self.matched, self._held = True, text[at:end], ""
            return text[:at]
        longest = max(len(s) for s in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(s.startswith(tail) for s in self._stops):
                self._held = tail
                return text[:-length]
        self._held = ""
        return text

    def finish(self) -> str:
        """The held tail: the text ended before it became a stop."""
        held, self._held = self._held, ""
        return held
