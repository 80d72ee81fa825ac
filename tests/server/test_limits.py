"""What the server refuses, over a real socket: each limit by its status, in OpenAI's form, and the next call is answered."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest
from models import checkpoint, small_llm
from served import all_free, error_of, free_port, serving

from berrylm_ref.cli import app as cli
from berrylm_ref.server.app import create_app
from berrylm_ref.server.limits import Limits

KEY = "sk-berry-1"
LONG = {"prompt": [1, 2, 3], "max_tokens": 3500, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    return small_llm(with_tokenizer=True, max_running_requests=2)


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 1, **body})


@contextmanager
def streams(client, count, **body):
    """``count`` streams that have brought their first line and run on."""
    with ExitStack() as stack:
        lines = []
        for _ in range(count):
            response = stack.enter_context(client.stream("POST", "/v1/completions", json={**LONG, "stream": True, **body}))
            lines.append(response.iter_lines())  # kept: dropping it would close the stream
            next(lines[-1])
        yield


def raw(client, data, *, until_closed=True, seconds=20):
    """What the server sends back for bytes on a socket of its own."""
    url = httpx.URL(client.base_url)
    with closing(socket.create_connection((url.host, url.port), timeout=seconds)) as s:
        s.sendall(data)
        got = b""
        while chunk := s.recv(65536):
            got += chunk
            if not until_closed:
                break
        return got


def status_and_error(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"], head.lower()


def test_the_key_is_asked_for_everywhere_but_on_health(llm):
    with serving(llm, api_key=KEY) as client:
        assert client.get("/health").status_code == 200
        paths = ("GET /v1/models", "GET /metrics", "POST /v1/completions", "POST /v1/chat/completions", "POST /generate")
        paths += ("POST /tokenize", "GET /openapi.json", "GET /nowhere", "GET /health/")
        wrong = (KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer", f"Basic {KEY}", b"Bearer \xff\xfe")
        for path in paths:
            for headers in ({}, {"x-api-key": KEY}, *({"authorization": w} for w in wrong)):
                response = client.request(*path.split(), headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
                assert KEY not in response.text
        client.headers["authorization"] = f"bearer {KEY}"
        assert complete(client).status_code == 200 and client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", ["", "with space", "schlüssel", "tab\t", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_at_the_start(llm, key):
    """An empty key would let in everyone who sends an empty one."""
    with pytest.raises(ValueError, match="ApiKey: key: expected printable ASCII"):
        create_app(llm, "tiny", api_key=key)


@pytest.mark.parametrize("field", list(Limits.__dataclass_fields__))
@pytest.mark.parametrize("value", [-1, "5", True, float("nan")])
def test_a_limit_is_a_positive_number(field, value):
    with pytest.raises(ValueError, match=f"Limits: {field}: expected .*, got"):
        Limits(**{field: value})


def test_a_body_over_the_limit_is_413_and_read_no_further(llm):
    """With a Content-Length it is refused unread; without one as soon as it is over: an endless body must not fill memory."""
    limit = 1000
    with serving(llm, limits=Limits(body_bytes=limit)) as client:
        for over in (0, 1):
            body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
            body += b" " * (limit + over - len(body))
            for content in (body, iter([body[:600], body[600:]])):
                response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
                assert response.status_code == 413 if over else 200, response.text
        assert error_of(response, 413)["code"] == "request_too_large"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        status, _, _ = status_and_error(raw(client, head + b"Content-Length: 1001\r\n\r\n"))
        assert status == 413, "said before a byte of the body was sent"
        chunk = b"%x\r\n%s\r\n" % (500, b" " * 500)
        status, _, headers = status_and_error(raw(client, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3))
        assert status == 413 and b"connection: close" in headers, "and the server hangs up on the rest"
        assert complete(client).status_code == 200


def test_an_endless_body_is_cut_off_after_a_few_buffers(llm):
    """The server answers and closes; what the kernels' buffers took is all that a client can make it take."""
    with serving(llm, limits=Limits(body_bytes=1000)) as client:
        url, sent = httpx.URL(client.base_url), 0
        with closing(socket.create_connection((url.host, url.port), timeout=20)) as s:
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(OSError, match="reset|Broken pipe|timed out"):
                while sent < 2**28:
                    s.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                    sent += 0x10000
        assert sent < 2**27
        assert complete(client).status_code == 200


def test_a_body_that_trickles_in_is_408_and_holds_nobody_up(llm):
    """Slow loris: a byte now and then would hold a place for ever."""
    with serving(llm, limits=Limits(body_seconds=0.6, calls=2)) as client:
        url = httpx.URL(client.base_url)
        with closing(socket.create_connection((url.host, url.port), timeout=20)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
            begin, answer = time.monotonic(), b""
            s.settimeout(0.1)
            while time.monotonic() - begin < 10 and not answer:
                try:
                    s.sendall(b" ")
                    answer = s.recv(65536)
                except TimeoutError:
                    assert complete(client).status_code == 200, "the others go on"
            s.settimeout(5)
            while chunk := s.recv(65536):
                answer += chunk
            status, error, _ = status_and_error(answer)
            assert status == 408 and error["code"] == "request_timeout" and time.monotonic() - begin < 5
        assert client.app_gate().calls == 0


def test_a_client_that_leaves_in_its_body_holds_nothing(llm):
    with serving(llm) as client:
        url = httpx.URL(client.base_url)
        with closing(socket.create_connection((url.host, url.port), timeout=20)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            wait_for(lambda: client.app_gate().calls == 1)
        wait_for(lambda: client.app_gate().calls == 0)


def test_a_long_prompt_is_refused_by_its_field(llm):
    with serving(llm, limits=Limits(prompt_tokens=10)) as client:
        assert complete(client, prompt=[1] * 10).status_code == 200
        for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
            error = error_of(client.post(path, json={field: "a" * 11}), 400)
            assert error["code"] == "context_length_exceeded" and error["param"] == field
            assert "at most 10 tokens" in error["message"]
        error = error_of(complete(client, prompt=[[1], [1] * 11]), 400)
        assert error["code"] == "context_length_exceeded"


def test_choices_of_a_call_are_prompts_times_n(llm):
    with serving(llm, limits=Limits(choices=6, queue=6)) as client:
        assert complete(client, prompt=[[1]] * 3, n=2).status_code == 200
        assert error_of(complete(client, prompt=[[1]] * 7), 400)["param"] == "n"
        assert error_of(complete(client, prompt=[[1], [2]], n=4), 400)["param"] == "n"
        body = {"input_ids": [[1], [2]], "sampling_params": {"n": 4}}
        assert error_of(client.post("/generate", json=body), 400)["param"] == "sampling_params.n"
    with serving(llm, limits=Limits(queue=1)) as client:
        assert "at most 3 choices" in error_of(complete(client, n=4), 400)["message"], "more than would ever be admitted"


def test_too_many_calls_are_429_and_the_others_finish(llm):
    with serving(llm, limits=Limits(calls=2)) as client:
        with streams(client, 2):
            response = complete(client)
            assert error_of(response, 429)["code"] == "too_many_calls" and response.headers["retry-after"] == "1"
            assert client.get("/health").status_code == 200 == client.get("/metrics").status_code
        wait_for(lambda: client.app_gate().calls == 0)
        assert complete(client).status_code == 200
        all_free(llm.engine)


def test_a_full_queue_is_503_before_a_stream_starts(llm):
    """Two run, one waits, one more would be one too many; whoever waits is not thrown out by it."""
    with serving(llm, limits=Limits(queue=1)) as client:
        answers = []
        with streams(client, 2, max_tokens=1500):
            waiting = threading.Thread(target=lambda: answers.append(complete(client, max_tokens=2)))
            waiting.start()
            wait_for(lambda: client.app_gate().choices == 3)
            for stream in (False, True):
                response = complete(client, stream=stream)
                assert error_of(response, 503)["code"] == "queue_full" and response.headers["retry-after"] == "1"
        waiting.join(30)
        assert answers[0].status_code == 200
        wait_for(lambda: client.app_gate().choices == 0)  # that the two streams were left, the server learns a moment later
        all_free(llm.engine)


def test_a_generation_that_takes_too_long_is_504_and_frees_its_places(llm):
    with serving(llm, limits=Limits(generation_seconds=0.3)) as client:
        assert error_of(client.post("/v1/completions", json=LONG), 504)["code"] == "generation_timeout"
        all_free(llm.engine, seconds=2)
        with client.stream("POST", "/generate", json={"input_ids": [1], "stream": True, "sampling_params":
                                                      {"max_new_tokens": 3500, "ignore_eos": True}}) as response:  # fmt: skip
            lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200, "it was sent before"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "generation_timeout"
        all_free(llm.engine, seconds=2)
        assert complete(client).status_code == 200


def test_a_stream_that_nobody_reads_is_cut_and_its_place_is_free(llm):
    """The client is there and takes nothing: its call would hold a place, and its answer memory, for ever."""
    with serving(llm, limits=Limits(send_seconds=0.5)) as client:
        url = httpx.URL(client.base_url)
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True}}
        data = json.dumps(body).encode()
        with closing(socket.socket()) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect((url.host, url.port))
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(data))
            s.sendall(b"Content-Type: application/json\r\n\r\n" + data)
            wait_for(lambda: client.app_gate().calls == 1)
            wait_for(lambda: client.app_gate().calls == 0)
            left = client.get("/metrics").text
        assert 'berrylm_requests_total{outcome="left",route="/generate"} 1.0' in left
        all_free(llm.engine)


@pytest.mark.parametrize("path,body", [("/v1/completions", LONG), ("/generate", {"input_ids": [1, 2], "sampling_params":
                         {"max_new_tokens": 3500, "ignore_eos": True}})])  # fmt: skip
def test_a_client_that_leaves_frees_its_slot_by_the_next_step(llm, path, body):
    """ENG-1, without streaming: no polling between the client's end and the cancellation."""
    with serving(llm) as client:
        url, data = httpx.URL(client.base_url), json.dumps(body).encode()
        request = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        with closing(socket.create_connection((url.host, url.port))) as s:
            s.sendall(request % (path.encode(), len(data), data))
            wait_for(lambda: llm.engine.scheduler.running)
            (running,) = llm.engine.scheduler.running
            steps_before = len(running.request.output_ids)
        left = time.monotonic()
        wait_for(lambda: not llm.engine.scheduler.running)
        made = len(running.request.output_ids) - steps_before
        print(f"freed after {1000 * (time.monotonic() - left):.0f} ms and {made} tokens")
        assert time.monotonic() - left < 2 and made < 1000
        all_free(llm.engine)


def test_a_long_text_does_not_block_the_others():
    """Tokenising runs in a thread: /health is answered while megabytes are cut into tokens, and then refused as too long."""
    llm = small_llm(with_tokenizer=True)
    with serving(llm) as client:
        answers = []
        text = "The quick brown fox 漢字 " * 100_000
        asking = threading.Thread(target=lambda: answers.append(complete(client, prompt=text)))
        asking.start()
        slowest = 0.0
        while asking.is_alive():
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
        assert error_of(answers[0], 400)["code"] == "context_length_exceeded"
        print(f"slowest /health {1000 * slowest:.0f} ms")
        assert slowest < 1


@pytest.mark.parametrize(
    "path,field,items",
    [
        ("/v1/completions", "prompt", '1,"x"'), ("/v1/completions", "stop", "1"), ("/v1/chat/completions", "messages", "1"),
        ("/generate", "input_ids", '1,[""]'), ("/detokenize", "tokens", '"x"'), ("/v1/completions", None, None),
    ],
)  # fmt: skip
def test_a_body_full_of_faults_does_not_block_the_others(llm, path, field, items):
    """A list of 600,000 faults, of which the client read the first, took the event loop five seconds and 600 MB."""
    if field is None:
        faults = ",".join(f'"a{i}": 1' for i in range(200_000))
    else:
        faults = f'"{field}": [{",".join([items] * 200_000)}]'
    need = '"prompt": "a", ' if path == "/v1/completions" and field != "prompt" else ""
    with serving(llm) as client:
        begin = time.monotonic()
        response = client.post(path, content="{" + need + faults + "}", headers={"content-type": "application/json"})
        took = time.monotonic() - begin
        assert error_of(response, 400)["param"] == (field or "a0")
        print(f"{took:.2f} s")
        assert took < 2


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


# The process: options, signals


@contextmanager
def process(*options, model=None, env=None):
    port = free_port()
    command = [sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(model or checkpoint(True)), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    child = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            end = time.monotonic() + 60
            while True:
                try:
                    client.get("/health")
                    break
                except httpx.HTTPError:
                    assert child.poll() is None and time.monotonic() < end, child.stderr.read() if child.poll() else "too slow"
                    time.sleep(0.1)
            yield child, client
    finally:
        child.kill()
        child.wait(10)


def collect(client, into, **body):
    def read():
        try:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, **body}) as response:
                into.extend(line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        except httpx.HTTPError as error:
            into.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: into)
    return thread


def test_the_first_signal_refuses_new_calls_and_lets_running_ones_finish():
    with process("--shutdown-grace", "20") as (child, client):
        lines = []
        thread = collect(client, lines, max_tokens=600)
        child.send_signal(signal.SIGTERM)
        wait_for(lambda: client.get("/health").status_code == 503)
        error = error_of(client.post("/v1/completions", json={"prompt": [1]}), 503)
        assert error["code"] == "shutting_down"
        thread.join(30)
        assert lines[-1] == "[DONE]" and json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert child.wait(10) == 0
        assert "Traceback" not in child.stderr.read()


def test_after_the_grace_period_running_calls_are_told_and_cancelled():
    with process("--shutdown-grace", "0.5", env={"BERRYLM_API_KEY": KEY}) as (child, client):
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        lines = []
        thread = collect(client, lines, max_tokens=15_000)
        child.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert child.wait(20) == 0 and time.monotonic() - begin < 8
        thread.join(10)
        assert json.loads(lines[-1])["error"]["type"] == "server_error"
        assert "Traceback" not in child.stderr.read() and KEY not in child.stdout.read()


def test_the_second_signal_ends_it_at_once():
    with process("--shutdown-grace", "60") as (child, client):
        lines = []
        thread = collect(client, lines, max_tokens=15_000)
        child.send_signal(signal.SIGTERM)
        wait_for(lambda: client.get("/health").status_code == 503)
        child.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert child.wait(10) == 0 and time.monotonic() - begin < 2
        thread.join(10)


def test_a_head_that_never_comes_and_an_idle_connection_are_closed(llm):
    """Slow loris: connections that send half a head, or nothing, cost a socket each until they are closed."""
    with serving(llm, header_seconds=0.5, idle_seconds=1) as client:
        begin = time.monotonic()
        assert raw(client, b"") == b"" and raw(client, b"GET /health HTTP/1.1\r\nHo") == b""
        whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        assert raw(client, whole).count(b"200 OK") == 1, "closed after the answer, since nothing came any more"
        assert raw(client, whole + b"GET /health HT").count(b"200 OK") == 1
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "options,message",
    [
        (["--api-key", "a b"], "ApiKey: key"), (["--max-body-bytes", "0"], "Limits: body_bytes"),
        (["--generation-timeout", "0"], "Limits: generation_seconds"), (["--tool-call-parser", "x"], "tool_call_parser"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line_and_status_2(options, message):
    from typer.testing import CliRunner

    done = CliRunner().invoke(cli, ["serve", "--model", str(checkpoint()), *options])
    assert done.exit_code == 2 and message in done.stderr


def test_the_address_is_known_before_it_is_told():
    """A second server on the port printed a curl line, which the first one answered, and failed after it; with port 0 the line
    said 0."""
    with process() as (_, client):
        taken = client.base_url.port
        command = [sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(checkpoint(True)), "--port"]
        second = subprocess.run([*command, str(taken)], capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and second.stdout == ""
        assert "serve: port: expected a free one" in second.stderr and "Traceback" not in second.stderr
    third = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True)
    try:
        line = "".join(third.stdout.readline() for _ in range(3)).partition("try:")[2]
        curl = subprocess.run(["sh", "-c", line.replace("curl", "curl -s --retry 40 --retry-connrefused --retry-delay 1", 1)],
                              capture_output=True, text=True, timeout=60)  # fmt: skip
        assert json.loads(curl.stdout)["choices"], curl.stderr
    finally:
        third.kill()
        third.wait(10)


@pytest.mark.parametrize("chat", [False, True])
def test_the_printed_curl_line_works_when_pasted(tmp_path, chat):
    """With a chat template in the folder it is a chat."""
    folder = tmp_path / "a model's folder"
    shutil.copytree(checkpoint(True), folder)
    if chat:
        (folder / "chat_template.jinja").write_text("{% for m in messages %}<user>{{ m.content }}{% endfor %}")
    with process(model=folder, env={"BERRYLM_API_KEY": KEY}) as (child, _):
        line = child.stdout.readline() + child.stdout.readline() + child.stdout.readline()
        command = line.partition("try:")[2]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env={**os.environ, "BERRYLM_API_KEY": KEY})
        answer = json.loads(done.stdout)
        assert answer["object"] == ("chat.completion" if chat else "text_completion") and answer["choices"], done.stderr
