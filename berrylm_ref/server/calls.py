"""From a call's body to requests that may run: made off the event loop, refused in the call's own words."""

import asyncio
from collections.abc import Callable, Mapping

from ..engine.request import ContextLengthError, Request
from .gate import current
from .protocol import ApiError


async def prepared(make: Callable[[], list[Request]], names: Mapping[str, str]) -> list[Request]:
    """``make()`` in a thread, since a long text takes long to tokenise. ApiError 400 for what it or the server's limits refuse.

    names: what the call calls the library's ``prompts``, ``max_tokens`` and so on, where it differs.
    """
    try:
        requests = await asyncio.to_thread(make)
        current.get().gate.check(requests)
        return requests
    except ValueError as error:
        raise refusal(error, names) from error


def refusal(error: ValueError, names: Mapping[str, str]) -> ApiError:
    """400 for an error of ours, "operation: argument: expected ..., got ...", with the call's name of the argument."""
    message = str(error)
    parts = message.split(": ")
    field = parts[1] if len(parts) > 2 else None
    if field in names:
        parts[1] = field = names[field]
        message = ": ".join(parts)
    return ApiError(400, message, field, "context_length_exceeded" if isinstance(error, ContextLengthError) else None)
