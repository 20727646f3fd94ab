"""uvicorn's connections, with a limit on the time that a request's head may take to come."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from agentinfer.server.problems import Problem, bytes_of


class TimedConnection(H11Protocol):
    """Mutable, as uvicorn's is. Closes itself if a connection or a head has begun, and the head takes too long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        head_timeout_s: float,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Wait on, if the head is still not whole; a next one may have begun."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._end()
        elif self._head_timer is None:
            self._begin()

    def send_400_response(self, msg: str) -> None:
        """Say that no request can be read, in the API's own shape, and close."""
        body = bytes_of(Problem(400, msg))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason="Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._give_up)

    def _end(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):  # pyright: ignore[reportUnnecessaryComparison] - None at first
            self.transport.close()
