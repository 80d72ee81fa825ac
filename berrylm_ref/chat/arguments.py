"""The arguments of one call as JSON text that only grows: what was sent is never rewritten."""

from collections.abc import Mapping

from berrylm_ref.chat.schema import STRING, ParameterType
from berrylm_ref.chat.values import escaped, value_json


class ArgumentWriter:
    """Turns keys and the text of their values into fragments of one JSON object; joined, they are the object.

    A value that is a string whatever it says is given piece by piece; every other value is given when it is complete. The
    first value of a key wins and later ones are dropped: JSON wants each key once and the first is already sent.

    Args:
        types: the types of the function's parameters; a parameter it lacks is a string.
    """

    def __init__(self, types: Mapping[str, ParameterType]):
        self._types = types
        self._keys: set[str] = set()
        self._type = STRING  # of the value being written
        self._repeated = False
        self._pieces: list[str] = []

    def begin(self, key: str) -> str:
        """A value begins."""
        self._repeated = key in self._keys
        if self._repeated:
            return ""
        lead = ", " if self._keys else "{"
        self._keys.add(key)
        self._type = self._types.get(key, STRING)
        self._pieces.clear()
        return f'{lead}"{escaped(key)}": ' + ('"' if self._type.only_string else "")

    def add(self, piece: str) -> str:
        """More text of the value."""
        if self._repeated:
            return ""
        if self._type.only_string:
            return escaped(piece)
        self._pieces.append(piece)
        return ""

    def end(self) -> str:
        """The value ends."""
        if self._repeated:
            return ""
        return '"' if self._type.only_string else value_json("".join(self._pieces), self._type)

    def close(self) -> str:
        """The call ends; no value is open."""
        return "}" if self._keys else "{}"
