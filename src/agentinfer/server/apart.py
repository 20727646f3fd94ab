"""The HTTP side in a process of its own: the mail as bytes on a socket, never pickle, and the child's main function.

A frame is its length and a msgpack array: reports one way, one command the other. The child's first frame is its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from attrs import define, field, frozen

from agentinfer.garbage import collected_seldom
from agentinfer.server.desk import Desk, hear
from agentinfer.server.front import Facts, Options, attend, make_desk
from agentinfer.server.mail import Command, Died, Ready, Report
from agentinfer.text import load_text

_HEAD: Final = struct.Struct("!I")
_COMMANDS: Final = msgspec.msgpack.Decoder(Command)
_REPORTS: Final = msgspec.msgpack.Decoder(list[Report])


@frozen
class Job:
    """What a child needs to know."""

    folder: str | None
    """Of the model, where it has a tokenizer."""
    facts: Facts
    options: Options


@define(eq=False)
class Wire:
    """Mutable: the engine's end of the socket. Any thread may send."""

    socket: socket.socket
    lock: threading.Lock = field(factory=threading.Lock)

    def send(self, reports: Sequence[Report]) -> None:
        """Tell the child. What it can not be told any more is lost: it has gone, and so have those who waited."""
        self.send_bytes(msgspec.msgpack.encode(reports))

    def send_bytes(self, body: bytes) -> None:
        """One frame."""
        try:
            with self.lock:
                self.socket.sendall(_HEAD.pack(len(body)) + body)
        except OSError:
            return

    def commands(self) -> Iterator[Command]:
        """What the child says, until it has gone; a connection is reset if it had not read all."""
        with self.socket.makefile("rb") as file, contextlib.suppress(ConnectionError):
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                (size,) = _HEAD.unpack(head)
                if len(body := file.read(size)) < size:
                    return
                yield _COMMANDS.decode(body)


def begin_child(theirs: socket.socket, listener: socket.socket, job: Job, wire: Wire) -> subprocess.Popen[bytes]:
    """Start the process that answers on *listener*, with its end of the socket."""
    ends = (theirs.fileno(), listener.fileno())
    command = [sys.executable, "-m", "agentinfer.server.apart", *map(str, ends)]
    child = subprocess.Popen(command, pass_fds=ends, start_new_session=True)  # noqa: S603 - this very module
    theirs.close()
    wire.send_bytes(msgspec.msgpack.encode(job))
    return child


def main(argv: Sequence[str]) -> int:
    """The child: answer until told to end, or until the engine's process is gone; the exit status."""
    logging.basicConfig(level=logging.WARNING, format="agentinfer: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    mail, listener = (socket.socket(fileno=int(number)) for number in argv)
    return asyncio.run(_serve(mail, listener))


async def _serve(mail: socket.socket, listener: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=mail)
    job = msgspec.msgpack.decode(await _frame(reader), type=Job)
    text = None if job.folder is None else load_text(Path(job.folder))

    def post(command: Command) -> None:
        body = msgspec.msgpack.encode(command)
        writer.write(_HEAD.pack(len(body)) + body)

    desk = make_desk(post, job.facts, job.options)
    with collected_seldom():
        hearing = asyncio.create_task(_hear(reader, desk))
        await attend(desk, listener, text, job.facts, job.options, lambda _end: post(Ready()))
        hearing.cancel()
    writer.close()
    return 0


async def _hear(reader: asyncio.StreamReader, desk: Desk) -> None:
    try:
        while True:
            hear(desk, _REPORTS.decode(await _frame(reader)))
    except (asyncio.IncompleteReadError, ConnectionError):
        if desk.dead is None:
            hear(desk, [Died("the engine's process is gone")])


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return await reader.readexactly(size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
