"""The API key: "Authorization: Bearer KEY", compared in constant time."""

import hmac
from collections.abc import Iterable

from .protocol import ApiError


class ApiKey:
    """One key. ValueError, which doesn't show it, unless it is printable ASCII without spaces, which any header can carry."""

    def __init__(self, key: str):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("ApiKey: key: expected printable ASCII characters without spaces, got something else")
        self._key = key.encode()

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 401 unless the ``headers`` of an ASGI scope carry the key. Which part of a wrong key fits can't be timed."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            message = "Authorization: expected 'Bearer ' and this server's API key"
            raise ApiError(401, message, None, "invalid_api_key", {"www-authenticate": "Bearer"})
