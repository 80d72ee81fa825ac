"""Two replicas of the shipped checkpoint on Ray Serve: what belongs together stays together, and one of them is killed.

Needs the extra ``scale``; `make scale-test` runs it.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest
from models import checkpoint
from served import all_free, error_of, free_port

from berrylm_ref.server.limits import Limits

pytestmark = [pytest.mark.scale, pytest.mark.timeout(600)]
GROUPS, ASKERS, SECONDS = 20, 8, 120


@pytest.fixture(scope="module")
def cluster():
    """``berrylm scale --replicas 2``: its URL, and a function that lists the pids of the replicas."""
    port, mark = free_port(), uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "BERRYLM_TEST": mark}
    command = [sys.executable, "-m", "berrylm_ref.cli", "scale", "--replicas", "2", "--port", str(port)]
    process = subprocess.Popen([*command, "--max-total-tokens", "32768"], env=environment, stdout=subprocess.PIPE, text=True)

    def replicas():
        return [pid for pid in marked(mark) if title(pid).startswith("ray::ServeReplica:default:Replica")]

    try:
        while "2 replicas" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, "the cluster did not start"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}", replicas
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        wait_for(lambda: not marked(mark), 30)  # nothing of it is left
    finally:
        process.kill()
        process.wait()


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def marked(mark):
    """The processes that have ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass  # gone, or not ours
    return found


def wait_for(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)


def prompt(group, tail):
    """130 tokens that a group has in common, then one of its own."""
    return random.Random(group).choices(range(10, 3000), k=130) + [10 + tail]


def ask(client, group, tail, stream=False):
    """The cached tokens of an answer that came whole; else what happened in its place."""
    body = {"prompt": prompt(group, tail), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        if not stream:
            response = client.post("/v1/completions", json=body)
            if response.status_code != 200:
                return error_of(response, 503)["code"]
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
            return "whole" if lines[-1:] == ["data: [DONE]"] else "replica_ended" if response.status_code == 503 else "cut"
    except httpx.HTTPError as error:
        return type(error).__name__


def test_streams_pass_event_by_event_and_errors_are_the_servers(cluster):
    """A front that collects the answer first would turn a stream into one late message."""
    url, _ = cluster
    with httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": prompt(1000, 0), "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            times = [time.monotonic() for line in response.iter_lines() if line]
        assert len(times) > 20 and times[-1] - times[0] > 0.1
        assert client.get("/health").json() == {"status": "ok"}
        assert error_of(client.post("/v1/completions", json={"max_tokens": 3}), 400)["param"] == "prompt"
        assert error_of(client.post("/v1/completions", content=b"{"), 400)
        assert client.get("/v1/nothing").status_code == 404


def test_a_killed_replica_loses_its_own_requests_and_is_replaced(cluster):
    """200 requests; what shares a prefix finds it in the cache; half-way a replica is killed; everybody else is answered."""
    url, replicas = cluster
    begin = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as client:
        for group in range(GROUPS):  # 40 requests: the first of a group is cold, the second finds it
            assert [ask(client, group, tail) for tail in range(2)] == [0, 128], "sent to two replicas"
    before, outcomes, left = replicas(), {}, list(range(160))
    assert len(before) == 2
    lock = threading.Lock()

    def asker():
        with httpx.Client(base_url=url, timeout=60) as client:
            while True:
                with lock:
                    if not left:
                        return
                    number = left.pop(0)
                    if number == 60:
                        os.kill(before[0], signal.SIGKILL)
                outcomes[number] = ask(client, number % GROUPS, 2 + number, stream=number % 2 == 1)

    askers = [threading.Thread(target=asker) for _ in range(ASKERS)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    lost = {n: what for n, what in outcomes.items() if what not in (0, 128, "whole")}
    print(f"lost: {lost}, in all {time.monotonic() - begin:.0f} s")
    assert len(outcomes) == 160
    assert len(lost) <= ASKERS and set(lost.values()) <= {"replica_ended", "cut", "RemoteProtocolError", "ReadError"}
    early = [outcomes[n] for n in range(0, 50, 2)]
    assert set(early) == {128}
    warm = [outcomes[n] for n in range(100, 160, 2)]
    assert 128 in warm, "the groups of the other replica are where they were"
    wait_for(lambda: len(replicas()) == 2 and before[0] not in replicas())
    with httpx.Client(base_url=url, timeout=60) as client:
        for group in range(GROUPS, 2 * GROUPS):
            assert [ask(client, group, tail) for tail in range(2)] == [0, 128]


def test_a_conversation_keeps_its_key():
    """A key that changes with every turn would send each turn to a replica that has not seen the one before."""
    replicas = pytest.importorskip("berrylm_ref.server.replicas")

    def key(**body):
        return replicas.key_of(json.dumps(body).encode())

    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    turn = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]
    assert key(messages=first) == key(messages=turn, temperature=0.5)
    assert key(messages=first) != key(messages=[*first[:1], {"role": "user", "content": "Bye"}])
    assert key(messages=first) != key(messages=first, tools=[{"type": "function"}])
    ids = list(range(100))
    assert key(prompt=ids) == key(prompt=[ids]) == key(input_ids=[*ids[:64], 7]) != key(prompt=[9, *ids])
    assert key(prompt="a" * 300) == key(text="a" * 256 + "b") != key(prompt="b" * 300)
    assert replicas.key_of(b"{") == replicas.key_of(b"[1]") == ""
    assert key(messages=[1, None]) and key(prompt=None) and key(messages=[])


def test_a_client_that_leaves_frees_its_places():
    """Otherwise a replica generates for nobody, and Ray Serve counts it as free."""
    replicas = pytest.importorskip("berrylm_ref.server.replicas")
    replica = replicas.Replica(str(checkpoint()), "tiny", Limits(), None, {"max_total_tokens": 4096})
    body = json.dumps({"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "query_string": b"", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"}, "raw_path": b"", "root_path": "",
    }  # fmt: skip

    async def leave():
        messages = replica.ask(scope, body)
        seen = [await anext(messages) for _ in range(3)]
        await messages.aclose()
        return [message["type"] for message in seen]

    assert asyncio.run(leave()) == ["http.response.start", "http.response.body", "http.response.body"]
    all_free(replica.llm.engine)
    replica.check_health()
    replica.app.state.engine.stop()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        replica.check_health()
