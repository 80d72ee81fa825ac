"""How much one client may ask for, and how much all of them together."""

from dataclasses import dataclass, fields

from .protocol import ApiError

RETRY_AFTER = {"retry-after": "1"}  # seconds: a place may be free with any step


@dataclass(frozen=True)
class Limits:
    """What the server refuses, and how. Every limit is a number above 0 (``queue`` may be 0); ValueError otherwise.

    body_bytes          of a call's body, with or without a Content-Length; more is 413, and no more than this is read
    body_seconds        for the whole body to arrive; later is 408
    prompt_tokens       of one prompt; None: what the context holds. More is 400, context_length_exceeded
    choices             of one call, prompts x n; more is 400
    calls               POST calls at a time, answered or still sending their bodies; more is 429
    queue               choices that wait for one of the engine's places; a call that does not fit any more is 503
    generation_seconds  from a call's admission to its last token; later is 504, in a stream an error event, and nothing runs on
    send_seconds        that a stream waits for its client to read on; then it is cut, and the client counts as gone
    """

    body_bytes: int = 8 * 2**20
    body_seconds: float = 30
    prompt_tokens: int | None = None
    choices: int = 128
    calls: int = 256
    queue: int = 256
    generation_seconds: float = 600
    send_seconds: float = 30

    def __post_init__(self):
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "queue" else 1
            if field.name.endswith("_seconds"):
                ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
                expected = "a number of seconds above 0"
            else:
                ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
                expected = f"an integer, {least} or more"
            if not ok and not (value is None and field.name == "prompt_tokens"):
                raise ValueError(f"Limits: {field.name}: expected {expected}, got {value!r}")

    def body_too_long(self) -> ApiError:
        return ApiError(413, f"body: expected at most {self.body_bytes} bytes, got more", code="request_too_large")

    def body_too_slow(self) -> ApiError:
        return ApiError(408, f"body: expected all of it within {self.body_seconds:g} seconds", code="request_timeout")

    def too_many_calls(self) -> ApiError:
        message = f"expected at most {self.calls} calls at a time, try again later"
        return ApiError(429, message, None, "too_many_calls", RETRY_AFTER)

    def queue_full(self) -> ApiError:
        message = f"expected at most {self.queue} waiting choices, try again later"
        return ApiError(503, message, None, "queue_full", RETRY_AFTER)

    def too_slow(self) -> ApiError:
        message = f"expected the answer to be complete within {self.generation_seconds:g} seconds"
        return ApiError(504, message, code="generation_timeout")
