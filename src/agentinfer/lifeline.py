"""What keeps the processes of one engine together: two TCP connections from rank 0 to each other rank.

Over one rank 0 sends its turns; over the other each side says every half second how far it is, and at once who is
gone. It knows processes, never models or states. A rank that dies closes its connections, whatever killed it; one that
hangs has said how far it came; one that is stopped says nothing any more.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import define, evolve, field, frozen

from agentinfer.ops.comm import Pulse, RankLost

_BEAT_S = 0.5
_SILENT_S = 30.0
_LEAVE_S = 3.0
_HEAD = struct.Struct("!I")


@define(eq=False)
class Line:
    """One connection. Mutable. Carries JSON objects, each after its length."""

    socket: socket.socket

    def send(self, data: Mapping[str, Any]) -> None:
        """Raises OSError."""
        body = json.dumps(data).encode()
        self.socket.sendall(_HEAD.pack(len(body)) + body)

    def receive(self) -> dict[str, Any] | None:
        """The next object; None: the other side has closed. Raises OSError."""
        head = self._read(_HEAD.size)
        body = None if head is None else self._read(_HEAD.unpack(head)[0])
        return None if body is None else json.loads(body)

    def _read(self, size: int) -> bytes | None:
        got = bytearray()
        while len(got) < size:
            piece = self.socket.recv(min(size - len(got), 1 << 20))
            if not piece:
                return None
            got += piece
        return bytes(got)

    def hang_up(self) -> None:
        """Close it, under whoever reads it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


@frozen
class Beat:
    """How far another rank said it was."""

    step: int = -1
    calls: int = 0
    waited_s: float = 0.0
    """Seconds in the collective that it is in; 0: it is in none."""
    silent_s: float = 0.0
    """Since it said so."""
    left: bool = False
    """It said goodbye."""


@define(eq=False)
class Lifeline:
    """Mutable: this rank's end of all lines, and the thread that watches them."""

    rank: int
    size: int
    turns: dict[int, Line]
    """Rank 0: to each other rank; the others: from 0. So are `watch` and `beats`."""
    watch: dict[int, Line]
    pulse: Pulse
    died: Callable[[int], str] = field(default=lambda rank: f"rank {rank} died")
    """Says how a rank whose connection broke came to its end."""
    give_up: Callable[[], None] = field(default=lambda: None)
    """Called once when a rank is lost, by the thread that watches."""
    leave: Callable[[str], None] = field(default=lambda _cause: None)
    """Called with the cause if the main thread has not closed this some seconds after a rank was lost."""
    beats: dict[int, Beat] = field(factory=dict[int, Beat])
    lock: threading.Lock = field(factory=threading.Lock)
    closed: threading.Event = field(factory=threading.Event)
    watcher: threading.Thread | None = None

    def begin(self) -> None:
        """Start to watch."""
        self.beats = dict.fromkeys(self.watch, Beat())
        self.watcher = threading.Thread(target=self._watch, name="agentinfer-lifeline", daemon=True)
        self.watcher.start()

    def tell(self, turn: Mapping[str, Any]) -> None:
        """Rank 0: send *turn* to all others. Raises RankLost."""
        self.check()
        for rank, line in self.turns.items():
            try:
                line.send(turn)
            except OSError as error:
                self.lose(self.died(rank))
                raise RankLost(self.pulse.lost) from error

    def told(self) -> Iterator[dict[str, Any]]:
        """The turns of rank 0, as they come, without end. Raises RankLost."""
        while True:
            try:
                turn = self.turns[0].receive()
            except OSError:
                turn = None
            if turn is None:
                self._await_cause()
                raise RankLost(self.pulse.lost or "rank 0 has closed the connection")
            yield turn

    def check(self) -> None:
        """Raises RankLost if any rank is lost."""
        if self.pulse.lost:
            raise RankLost(self.pulse.lost)

    def lose(self, cause: str) -> None:
        """A rank is gone, or has to go: tell all, and let nobody wait any longer. The first cause stays."""
        with self.lock:
            if self.pulse.lost or self.closed.is_set():
                return
            self.pulse.lost = cause
        self._say({"lost": cause})
        for line in self.turns.values():
            line.hang_up()
        self.give_up()

    def close(self) -> None:
        """Say goodbye and watch no more."""
        self.closed.set()
        self._say({"bye": True})
        lines = (*self.turns.values(), *self.watch.values())
        for line in lines:
            line.hang_up()
        if self.watcher is not None:
            self.watcher.join(_LEAVE_S)
        for line in lines:
            line.socket.close()

    def await_goodbyes(self, within_s: float) -> bool:
        """Whether all others said goodbye in time. Raises RankLost."""
        until = time.monotonic() + within_s
        while not all(beat.left for beat in self.beats.values()):
            self.check()
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _await_cause(self) -> None:
        until = time.monotonic() + 2 * _BEAT_S
        while not self.pulse.lost and time.monotonic() < until:
            time.sleep(0.01)

    def _say(self, data: Mapping[str, Any]) -> None:
        for line in self.watch.values():
            with contextlib.suppress(OSError):
                line.send(data)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, line in self.watch.items():
                ready.register(line.socket, selectors.EVENT_READ, rank)
            beat_at = time.monotonic()
            while not self.closed.is_set() and not self.pulse.lost:
                for key, _ in ready.select(max(0.0, beat_at - time.monotonic())):
                    if not self._hear(key.data):
                        ready.unregister(key.fileobj)
                if time.monotonic() >= beat_at and not self.closed.is_set():
                    beat_at = time.monotonic() + _BEAT_S
                    self._say(self._own())
                    self._judge()
        if self.pulse.lost and not self.closed.wait(_LEAVE_S):
            self.leave(self.pulse.lost)

    def _hear(self, rank: int) -> bool:
        """Take in what *rank* says. Whether it may say more."""
        try:
            said = self.watch[rank].receive()
        except OSError:
            said = None
        if said is None:
            if not self.beats[rank].left:
                self.lose(self.died(rank))
            return False
        if "lost" in said:
            self.lose(said["lost"])
        elif "bye" in said:
            self.beats[rank] = evolve(self.beats[rank], left=True)
        else:
            self.beats[rank] = Beat(**said)
        return True

    def _own(self) -> dict[str, Any]:
        since = self.pulse.since
        waited = 0.0 if since is None else time.monotonic() - since
        return {"step": self.pulse.step, "calls": self.pulse.calls, "waited_s": waited}

    def _judge(self) -> None:
        """Count the silence of each other rank: in beats of one's own, so that a stopped process blames nobody. Rank 0
        names who keeps the others waiting.
        """
        for rank, beat in self.beats.items():
            self.beats[rank] = evolve(beat, silent_s=beat.silent_s + _BEAT_S)
            if beat.silent_s > _SILENT_S and not beat.left:
                self.lose(f"rank {rank} has not answered for {_SILENT_S:g} s")
        if self.rank == 0:
            verdict = late({0: Beat(**self._own()), **self.beats}, self.pulse.deadline_s)
            if verdict:
                self.lose(verdict)


def late(beats: Mapping[int, Beat], deadline_s: float) -> str:
    """Which rank keeps another waiting for longer than *deadline_s*, in words: who is behind. Empty: none does."""
    waiting = [rank for rank, beat in beats.items() if beat.waited_s > deadline_s]
    if not waiting:
        return ""
    behind = min(beats, key=lambda rank: (beats[rank].step, beats[rank].calls, beats[rank].waited_s))
    first, last = beats[behind], beats[waiting[0]]
    if (first.step, first.calls) == (last.step, last.calls):
        return (
            f"collective {last.calls} of step {last.step}, in which all ranks are, takes longer than {deadline_s:g} s"
        )
    return f"rank {behind} keeps rank {waiting[0]} waiting for longer than {deadline_s:g} s in step {last.step}"


def listen(host: str) -> socket.socket:
    """A socket for the other ranks to call, at a port that is free."""
    return socket.create_server((host, 0), backlog=128)


def accept(
    listener: socket.socket, key: str, pulse: Pulse, size: int, within_s: float, dead: Callable[[], str]
) -> Lifeline:
    """Rank 0's end, once all others have called. *dead*: who has died meanwhile, or nothing.

    Raises RankLost naming who died, or who is missing.
    """
    turns: dict[int, Line] = {}
    watch: dict[int, Line] = {}
    listener.settimeout(0.1)
    until = time.monotonic() + within_s
    with contextlib.ExitStack() as opened:
        while len(turns) + len(watch) < 2 * (size - 1):
            missing = [rank for rank in range(1, size) if rank not in watch]
            if said := dead():
                raise RankLost(said)
            if time.monotonic() > until:
                raise RankLost(f"ranks {missing} did not start within {within_s:g} s")
            with contextlib.suppress(TimeoutError):
                line = Line(_quick(opened.enter_context(listener.accept()[0]), 5.0))
                hello = _hello(line, key)
                if hello is not None:
                    (turns if hello["for"] == "turns" else watch)[hello["rank"]] = line
        opened.pop_all()
    return _opened(0, size, turns, watch, pulse)


def dial(host: str, port: int, key: str, rank: int, size: int, pulse: Pulse) -> Lifeline:
    """The end of a rank that is not 0. Raises OSError if rank 0 does not answer."""
    lines: list[Line] = []
    for purpose in ("turns", "watch"):
        lines.append(Line(_quick(socket.create_connection((host, port), 10.0), 10.0)))
        lines[-1].send({"key": key, "rank": rank, "for": purpose})
    return _opened(rank, size, {0: lines[0]}, {0: lines[1]}, pulse)


def _opened(rank: int, size: int, turns: dict[int, Line], watch: dict[int, Line], pulse: Pulse) -> Lifeline:
    for line in turns.values():
        line.socket.settimeout(None)
    return Lifeline(rank, size, turns, watch, pulse)


def _quick(connection: socket.socket, timeout_s: float) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(timeout_s)
    return connection


def _hello(line: Line, key: str) -> dict[str, Any] | None:
    """What who called says of itself; None, and closed, if it does not know the *key*."""
    try:
        said = line.receive()
    except (OSError, ValueError):
        said = None
    if said is not None and hmac.compare_digest(str(said.get("key")), key):
        return said
    line.socket.close()
    return None
