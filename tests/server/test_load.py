"""Two hundred clients at once, a third of which leave: nobody's slot stays, nobody else notices, /health answers."""

import asyncio
import json
import os
import subprocess
import sys
import time

import httpx

# The server and the clients have processes of their own, or they would take the time that /health is measured against.
SERVER = """
import sys
sys.path.insert(0, {tests!r})
from models import small_llm
from berrylm_ref.server.app import create_app
from berrylm_ref.server.graceful import GracefulServer

llm = small_llm(with_tokenizer=True, dtype="float32", max_running_requests=16)
app = create_app(llm, "tiny")

@app.get("/state")
async def state():
    llm.engine.check()
    pool, scheduler = llm.engine.cache.pool, llm.engine.scheduler
    held = pool.slots.capacity - pool.slots.free_count
    return {{"running": len(scheduler.running), "waiting": len(scheduler.waiting), "slots": held,
             "calls": app.state.engine.calls, "choices": app.state.engine.choices}}

GracefulServer(app, host="127.0.0.1", port={port}, grace=5, header_seconds=10, idle_seconds=5).run()
"""
CLIENTS = 200


async def one_client(client, i):
    """Client i: two in three read to the end, a third leaves; of each kind some stream and some wait. "left" or the text."""
    leaves, streams = i % 3 == 0, i % 2 == 0
    body = {"prompt": f"client {i} ", "temperature": 0, "ignore_eos": True, "max_tokens": 2000 if leaves else 8}
    if not streams:
        asking = client.post("/v1/completions", json=body)
        try:
            answer = await asyncio.wait_for(asking, 0.5 if leaves else None)
        except TimeoutError:
            return "left"
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]
    ids = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return ids
            if line.startswith("data: "):
                ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if leaves:
                    return "left"
    raise AssertionError("the stream ended without [DONE]")


async def crowd(url):
    """What became of every client, and what two of them get when they ask again alone."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        fates = await asyncio.gather(*(one_client(client, i) for i in range(CLIENTS)))
        alone = [await one_client(client, i) for i in (1, 2)]
    return fates, alone


def watched(url, clients):
    """How long /health took, again and again while ``clients`` runs: a watchdog, in neither's process."""
    times = []
    with httpx.Client(base_url=url, timeout=30) as client:
        while clients.poll() is None:
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - begin)
            time.sleep(0.02)
    return times


def test_200_clients_of_which_a_third_leaves():
    """ENG-1 in numbers."""
    from served import free_port

    port = free_port()
    code = SERVER.format(tests=os.path.dirname(os.path.dirname(__file__)), port=port)
    server = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        begin = time.monotonic()
        clients = subprocess.Popen([sys.executable, __file__, url], stdout=subprocess.PIPE, text=True)
        times = watched(url, clients)
        fates, alone = json.loads(clients.stdout.read())
        slowest = sorted(times)[-3:]
        print(f"{CLIENTS} clients in {time.monotonic() - begin:.1f} s, {len(times)} times /health, the slowest {slowest} s")
        for i, fate in enumerate(fates):
            assert fate == "left" if i % 3 == 0 else len(fate) == 8, (i, fate)
        assert [fates[1], fates[2]] == alone, "an answer in the crowd is the one it gets alone"
        assert len(times) > 20 and slowest[-1] < 1
        end = time.monotonic() + 5
        while set((state := httpx.get(f"{url}/state").json()).values()) != {0}:
            assert time.monotonic() < end, state
            time.sleep(0.05)
    finally:
        server.terminate()
        assert server.wait(20) == 0


if __name__ == "__main__":
    print(json.dumps(asyncio.run(crowd(sys.argv[1]))))
