"""How the server ends: nobody new after the first signal, a time for the others to finish, and at once after the second."""

import asyncio
import os
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

AFTERWARDS = 2  # seconds: for the last bytes to reach their clients


def bound(host: str, port: int) -> socket.socket:
    """A socket that has ``port`` of ``host``, or with 0 one that is free; ValueError where it can't be had.

    Bound before the server runs, so that the address can be told to the user, and never that of another server.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that has just ended
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ValueError(f"serve: port: expected a free one on {host}, got {port}: {error.strerror}") from error
    return found


class GracefulServer(uvicorn.Server):
    """uvicorn, which would close its port at once, keeps it open while running calls finish: new ones are told 503.

    grace: seconds for them, then they are cancelled and told so. header_seconds: a connection that has sent no whole request
    head by then is closed (uvicorn itself closes those that idle *between* requests, timeout_keep_alive). A second signal
    ends the process where it stands. Either way the exit status is 0: it was asked to go.
    """

    def __init__(self, app: FastAPI, *, host: str, port: int, grace: float, header_seconds: float, idle_seconds: int):
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http="h11",
                ws="none",
                log_level="warning",
                timeout_keep_alive=idle_seconds,
                timeout_graceful_shutdown=AFTERWARDS,
            )
        )
        self._gate = app.state.engine
        self._grace, self._header_seconds = grace, header_seconds
        self._deadline: float | None = None
        self._silent: dict[asyncio.Protocol, float] = {}  # connection -> since when it has no request

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            os._exit(0)
        self._gate.draining = True
        self._deadline = time.monotonic() + self._grace

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self._close_silent()
        if self._deadline is not None and not self._gate.calls:
            return True
        if self._deadline is not None and time.monotonic() > self._deadline:
            await asyncio.to_thread(self._gate.stop)
            return True
        return await super().on_tick(counter)

    def _close_silent(self) -> None:
        now, silent = time.monotonic(), {}
        for connection in self.server_state.connections:
            if connection.cycle is None or connection.cycle.response_complete:
                silent[connection] = since = self._silent.get(connection, now)
                if now - since > self._header_seconds:
                    connection.transport.close()
        self._silent = silent
