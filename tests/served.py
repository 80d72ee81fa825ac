"""A server over a real socket for the tests, and its errors in OpenAI's form."""

import re
import socket
import threading
import time
from contextlib import contextmanager

import httpx

from berrylm_ref.server.app import create_app
from berrylm_ref.server.graceful import GracefulServer


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def serving(llm, header_seconds=10, idle_seconds=5, name="tiny", **options):
    """An httpx client of ``create_app(llm, name, **options)``, which runs in a thread."""
    port = free_port()
    app = create_app(llm, name, **options)
    server = GracefulServer(app, host="127.0.0.1", port=port, grace=1, header_seconds=header_seconds, idle_seconds=idle_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.02)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.app_gate = lambda: app.state.engine  # its counters, for tests that look inside
            yield client
    finally:
        server.should_exit = True
        thread.join(10)


def error_of(response, status):
    """The error object of ``response``, which has this status and OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def all_free(engine, seconds=20):
    """Wait until nothing runs or waits; then every slot is free and everything adds up."""
    end = time.monotonic() + seconds
    while engine.scheduler.running or engine.scheduler.waiting:
        assert time.monotonic() < end, "a request still runs or waits"
        time.sleep(0.02)
    engine.check()
    slots = engine.cache.pool.slots
    assert slots.free_count == slots.capacity


@contextmanager
def saying(*replies):
    """The address of something that reads a call and says the next of ``replies``, the last one again and again, and hangs up."""
    left = list(replies)

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65536)
                head, _, body = head.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                while length and len(body) < int(length[1]):
                    body += connection.recv(65536)
                connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def whole(text, more=0):
    """A 200 with ``text``, which claims to be ``more`` bytes longer."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text) + more, text.encode())
