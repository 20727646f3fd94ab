"""The life of a server: the engine's thread, and the HTTP side beside it, in this process or in another."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from agentinfer.errors import AgentInferError
from agentinfer.loop import Engine
from agentinfer.server.apart import Job, Wire, begin_child
from agentinfer.server.desk import hear
from agentinfer.server.driver import Driver, Intake, Tell, drive, take_in
from agentinfer.server.front import Facts, Options, attend, make_desk
from agentinfer.server.mail import Command, Quit, Ready, Report

_JOIN_S: Final = 10.0
WhenReady = Callable[[Callable[[], object]], None]


class EngineDead(AgentInferError, RuntimeError):
    """The engine could not go on, and the server has ended."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address; connections are refused until it is served. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def serve(engine: Engine, listener: socket.socket, options: Options, *, ready: WhenReady = lambda _end: None) -> None:
    """Answer on *listener* until SIGTERM or SIGINT come, which they do in the main thread only.

    The first signal lets those finish that have begun, for `shutdown_timeout_s`; the second one does not. *ready* is
    called once requests are answered, with a function that does what a signal does, from any thread. Raises EngineDead.
    """
    limits = engine.machine.limits
    facts = Facts(limits.max_model_len, limits.max_num_seqs, limits.num_blocks, limits.block_size)
    with ThreadPoolExecutor(1, "agentinfer-form") as forms:
        if options.apart:
            _apart(engine, listener, facts, options, ready, forms)
        else:
            asyncio.run(_here(engine, listener, facts, options, ready, forms))


@contextlib.contextmanager
def _driving(engine: Engine, inbox: SimpleQueue[Command], tell: Tell) -> Generator[None]:
    """The engine's thread, for the time of the block. Raises EngineDead at its end if it died, or does not end."""
    driver = Driver(engine, inbox, tell)
    thread = threading.Thread(target=drive, args=(driver,), name="agentinfer-engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        inbox.put(Quit())
        thread.join(_JOIN_S)
    if driver.dead is not None:
        raise EngineDead(driver.dead)
    if thread.is_alive():
        raise EngineDead(f"a step did not end within {_JOIN_S:g} s")


async def _here(
    engine: Engine, listener: socket.socket, facts: Facts, options: Options, ready: WhenReady, forms: Executor
) -> None:
    """The HTTP side as the event loop of this thread."""
    loop, inbox = asyncio.get_running_loop(), SimpleQueue[Command]()

    def tell(reports: Sequence[Report]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(hear, desk, reports)

    desk = make_desk(partial(take_in, Intake(engine, inbox, tell, forms)), facts, options)
    with _driving(engine, inbox, tell):
        await attend(desk, listener, engine.text, facts, options, ready)


def _apart(
    engine: Engine, listener: socket.socket, facts: Facts, options: Options, ready: WhenReady, forms: Executor
) -> None:
    """The HTTP side as a process of its own, with an interpreter that no step has to wait for."""
    inbox, folder = SimpleQueue[Command](), None if engine.text is None else str(engine.text.folder)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire, told = Wire(ours), threading.Event()
        child: subprocess.Popen[bytes] | None = None

        def end() -> None:
            told.set()
            if child is not None:
                child.send_signal(signal.SIGTERM)

        with _forwarded(end):
            child = begin_child(theirs, listener, Job(folder, facts, options), wire)
            if told.is_set():
                end()
            listener.close()  # the child's: when it goes, nobody accepts
            intake, failures = Intake(engine, inbox, wire.send, forms), list[Exception]()
            given = (wire, intake, partial(ready, end), child, failures)
            threading.Thread(target=_hear_child, args=given, daemon=True).start()
            with _driving(engine, inbox, wire.send):
                status = child.wait()
    if failures:
        raise failures[0]
    by_signal = told.is_set() and status == -signal.SIGTERM  # it did not listen to signals yet, or any more
    if status != 0 and not by_signal:
        raise EngineDead(f"the process that answers over HTTP ended with status {status}")


def _hear_child(
    wire: Wire, intake: Intake, ready: Callable[[], None], child: subprocess.Popen[bytes], failures: list[Exception]
) -> None:
    """Take in the child's commands, until it has gone. What can not be done is one of *failures*, and ends the child:
    nobody would hear it any more.
    """
    try:
        for command in wire.commands():
            if isinstance(command, Ready):
                ready()
            else:
                take_in(intake, command)
    except Exception as error:  # noqa: BLE001 - raised by who waits for the child
        failures.append(error)
        child.kill()


@contextlib.contextmanager
def _forwarded(end: Callable[[], object]) -> Generator[None]:
    """SIGTERM and SIGINT of this process are the child's, in the main thread; nowhere else do signals come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(_number: int, _frame: Any) -> None:
        end()

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
