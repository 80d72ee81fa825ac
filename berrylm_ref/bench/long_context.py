"""One prompt of the whole context: prefilled chunk by chunk, then decoded beside a short one."""

import time
from typing import Any

from ..engine.llm import LLM
from ..engine.memory import kv_token_bytes, state_bytes
from .steps import new_requests, running, step_seconds, until_decoding

DECODED = 32


def long_context(llm: LLM, tokens: int, short: int, deadline: float) -> dict[str, Any]:
    """Seconds of every prefill step of one prompt of ``tokens``, and a decode step there and after ``short`` tokens."""
    chunks, step = prefill_and_decode(llm, tokens, deadline)
    _, short_step = prefill_and_decode(llm, short, deadline)
    print(
        f"{tokens} tokens prefilled in {sum(chunks):.1f} s; a decode step then {1e3 * step:.2f} ms, "
        f"after {short} tokens {1e3 * short_step:.2f} ms",
        flush=True,
    )
    c, dtype = llm.model.local, llm.model.dtype
    return {
        "prompt_tokens": tokens,
        "decoded_tokens": DECODED,
        "prefill_seconds": sum(chunks),
        "prefill_tokens_per_s": tokens / sum(chunks),
        "step_seconds": chunks,  # with overlap a step waits for the chunk launched before its own
        "decode_ms": 1e3 * step,
        "short_prompt_tokens": short,
        "short_decode_ms": 1e3 * short_step,
        "decode_ratio": step / short_step,
        "kv_bytes": (tokens + DECODED) * kv_token_bytes(c, dtype),
        "state_bytes": state_bytes(c, dtype),
    }


def prefill_and_decode(llm: LLM, tokens: int, deadline: float) -> tuple[list[float], float]:
    requests = new_requests(llm, 1, tokens, 2 * DECODED, "long context")
    with running(llm, requests):
        chunks = until_decoding(llm, requests, deadline)
        if time.monotonic() > deadline:
            raise TimeoutError("the time limit has passed after the prefill")
        return chunks, step_seconds(llm, DECODED)
