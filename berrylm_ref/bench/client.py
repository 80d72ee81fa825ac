"""A client of /v1/completions that costs little: the same load as ``drive``, over HTTP, with streaming.

Plain asyncio sockets: a general HTTP library spends more on a token than the server does, and would be what is measured.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from .drive import Progress
from .timing import Run, Timing
from .workload import Workload

LIMIT = 1 << 24  # bytes of one line of the answer


def run_over_http(
    url: str,
    workload: Workload,
    vocab_size: int,
    *,
    model: str | None = None,
    api_key: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Send ``workload`` to the server at ``url``. A refused or broken request ends the run with a ValueError."""
    address = parse_url(url)
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": workload.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"model": model} if model else {}),
        }
        for prompt in workload.prompts(vocab_size)
    ]
    return asyncio.run(_run(address, bodies, workload.concurrency, api_key, progress))


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of "http://host:port"."""
    parts = urlsplit(url)
    try:
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(url)
        return parts.hostname, parts.port or 80
    except ValueError as error:  # a port that is none raises it, too
        raise ValueError(f"bench: url: expected http://HOST:PORT, got {url!r}") from error


async def _run(
    address: tuple[str, int], bodies: list[dict], concurrency: int, api_key: str | None, progress: Progress | None
) -> Run:
    gate, timings, ended = asyncio.Semaphore(concurrency), [], 0

    async def one(body: dict) -> None:
        nonlocal ended
        payload = json.dumps(body).encode()
        async with gate:
            timing = Timing(time.perf_counter(), len(body["prompt"]))
            timings.append(timing)
            async for chunk in post_stream(address, "/v1/completions", payload, api_key):
                note(timing, chunk)
        if math.isnan(timing.first) or not timing.output_tokens:
            raise ValueError(f"bench: {address[0]}:{address[1]}: expected tokens and a usage chunk, the stream held none")
        ended += 1
        if progress:
            progress(ended)

    begin = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(one(body))
    except ExceptionGroup as faults:  # the first one is the news, the rest were cancelled
        raise faults.exceptions[0] from faults
    return Run(max(t.last for t in timings) - begin, sorted(timings, key=lambda t: t.sent))


def note(timing: Timing, chunk: dict[str, Any]) -> None:
    """Book one chunk of a stream: tokens by the clock, their number by the server's own count."""
    if "error" in chunk:
        raise ValueError(f"bench: the server ended the stream: {chunk['error'].get('message')}")
    if chunk.get("choices"):
        timing.last = time.perf_counter()
        if math.isnan(timing.first):
            timing.first = timing.last
    if usage := chunk.get("usage"):
        timing.prompt_tokens, timing.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def post_stream(
    address: tuple[str, int], path: str, payload: bytes, api_key: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """POST; yields the JSON of each ``data:`` line until [DONE]. ValueError for a status other than 200."""
    reader, writer = await asyncio.open_connection(*address, limit=LIMIT)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
        status = (await reader.readline()).decode("latin-1").split(" ", 2)
        chunked = False
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            chunked |= line.lower().split() == [b"transfer-encoding:", b"chunked"]
        pieces = body_pieces(reader, chunked)
        if len(status) < 2 or status[1] != "200":
            text = b"".join([piece async for piece in pieces]).decode(errors="replace")[:500]
            raise ValueError(f"bench: {address[0]}:{address[1]}: expected status 200, got {' '.join(status).strip()}: {text}")
        rest = b""
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
        raise ValueError(f"bench: {address[0]}:{address[1]}: expected the stream to end with [DONE], it broke off")
    finally:
        writer.close()


async def body_pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes: chunk by chunk, or until the connection closes."""
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        try:
            yield (await reader.readexactly(size + 2))[:-2]
        except asyncio.IncompleteReadError:
            return  # the caller misses [DONE]
