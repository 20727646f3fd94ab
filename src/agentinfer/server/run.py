"""The life of a server: the engine's thread, the event loop, signals, and the end of all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import uvicorn
from attrs import define, field, frozen

from agentinfer.errors import AgentInferError
from agentinfer.loop import Engine, Request, check_form
from agentinfer.server.app import make_app
from agentinfer.server.connection import TimedConnection
from agentinfer.server.desk import Desk, Queues, drop, emptied, hear, quit_engine
from agentinfer.server.driver import Driver, drive
from agentinfer.server.guard import Keys
from agentinfer.server.mail import Command, Item, Report
from agentinfer.server.metrics import Metrics
from agentinfer.server.site import Quotas, Site
from agentinfer.server.tools import format_of

_log = logging.getLogger(__name__)
_LAST_WORDS_S: Final = 2.0
"""For answers to those who waited when the engine died, and for health checks to see it."""
_CLOSE_S: Final = 5.0
_JOIN_S: Final = 10.0
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_FORMS: Final = 16


Ready = Callable[[Callable[[], object]], None]


class EngineDead(AgentInferError, RuntimeError):
    """The engine could not go on, and the server has ended."""


@frozen
class Options:
    """How to serve, beside what each request may ask for (Quotas)."""

    names: tuple[str, ...]
    keys: Keys
    quotas: Quotas = Quotas()
    parser: str = "auto"
    """A name of parsers.FORMATS; auto: what the chat template looks like; none."""
    max_queued: int | None = None
    """Sequences that may wait for their first token; None: four times as many as can run."""
    max_queued_tokens: int | None = None
    """None: four times as many as KV holds."""
    shutdown_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    """Of a connection between two requests."""
    max_stall_s: float = 60.0
    """A step that takes longer turns /health to 503."""
    ui: bool = True
    """A status page at /."""


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


def serve(
    engine: Engine,
    listener: socket.socket,
    options: Options,
    *,
    ready: Ready = lambda _end: None,
    trace: Callable[[], bytes] | None = None,
) -> None:
    """Answer on *listener* until SIGTERM or SIGINT come, which they do in the main thread only.

    The first signal lets those finish that have begun, for `shutdown_timeout_s`; the second one does not. *ready* is
    called once requests are answered, with a function that does what a signal does, from any thread. Raises EngineDead.
    """
    asyncio.run(_serve(engine, listener, options, ready, trace))


class _Server(uvicorn.Server):
    """Mutable, as uvicorn's is. It leaves signals alone: they are heard here."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._ready()


@define(eq=False)
class _Life:
    """Mutable: how far the end has come."""

    ending: asyncio.Event = field(factory=asyncio.Event)
    hurry: asyncio.Event = field(factory=asyncio.Event)


async def _serve(
    engine: Engine, listener: socket.socket, options: Options, ready: Ready, trace: Callable[[], bytes] | None
) -> None:
    loop = asyncio.get_running_loop()
    inbox = SimpleQueue[Command]()
    desk = _desk(engine, inbox, options)
    driver = Driver(engine, inbox, partial(_tell, loop, desk))
    thread = threading.Thread(target=drive, args=(driver,), name="agentinfer-engine", daemon=True)
    with ThreadPoolExecutor(2, "agentinfer-text") as pool, ThreadPoolExecutor(1, "agentinfer-form") as forms:
        site, life = _site(engine, desk, driver, options, pool, forms, trace), _Life()
        server = _Server(_config(site, options), partial(ready, lambda: loop.call_soon_threadsafe(_end, life)))
        thread.start()
        with _signals(life):
            serving = asyncio.create_task(server.serve([listener]))
            await _until_the_end(desk, life, options.shutdown_timeout_s)
            server.should_exit = True
            await serving
    quit_engine(desk)
    await asyncio.to_thread(thread.join, _JOIN_S)
    if desk.dead is not None:
        raise EngineDead(desk.dead)
    if thread.is_alive():
        raise EngineDead(f"a step did not end within {_JOIN_S:g} s")


def _desk(engine: Engine, inbox: SimpleQueue[Command], options: Options) -> Desk:
    """The event loop's end of *inbox*."""
    limits = engine.machine.limits
    queues = Queues(
        options.max_queued or 4 * limits.max_num_seqs,
        options.max_queued_tokens or 4 * limits.num_blocks * limits.block_size,
    )
    metrics = Metrics(num_free_blocks=limits.num_blocks, num_blocks=limits.num_blocks)
    return Desk(inbox.put, queues, metrics)


def _site(
    engine: Engine,
    desk: Desk,
    driver: Driver,
    options: Options,
    pool: Executor,
    forms: Executor,
    trace: Callable[[], bytes] | None,
) -> Site:
    """What endpoints know. Of the engine only what never changes, when its step began, and where its grammars are."""
    return Site(
        desk=desk,
        text=engine.text,
        names=options.names,
        created=int(time.time()),
        max_model_len=engine.machine.limits.max_model_len,
        quotas=options.quotas,
        form=format_of(engine.text, options.parser),
        pool=pool,
        forms=forms,
        form_slots=asyncio.Semaphore(_MAX_FORMS),
        prepare=partial(_prepare, engine),
        stalled_s=partial(_stalled_s, driver),
        max_stall_s=options.max_stall_s,
        ui=options.ui,
        trace=trace,
    )


def _prepare(engine: Engine, item: Item) -> None:
    check_form(engine.grammars, Request(item.prompt, item.params))


def _config(site: Site, options: Options) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(site, options.keys),
        http=partial(TimedConnection, head_timeout_s=options.head_timeout_s),  # pyright: ignore[reportArgumentType] - called as a class is
        loop="asyncio",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=options.idle_timeout_s,  # pyright: ignore[reportArgumentType] - seconds of call_later
        timeout_graceful_shutdown=round(_CLOSE_S),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )


def _tell(loop: asyncio.AbstractEventLoop, desk: Desk, reports: Sequence[Report]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(hear, desk, reports)


def _stalled_s(driver: Driver) -> float:
    began = driver.began
    return 0.0 if began is None else time.monotonic() - began


@contextlib.contextmanager
def _signals(life: _Life) -> Generator[None]:
    """SIGTERM and SIGINT end the server, in the main thread; nowhere else do signals come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, heard = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in heard:
        loop.add_signal_handler(number, _end, life)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def _end(life: _Life) -> None:
    if life.ending.is_set():
        life.hurry.set()
    life.ending.set()


async def _until_the_end(desk: Desk, life: _Life, shutdown_timeout_s: float) -> None:
    """Wait for a signal or the engine's death; then until those who are being served are, or their time is up."""
    await _first(life.ending.wait(), desk.death.wait())
    if desk.dead is not None:
        _log.error("the engine has failed: %s", desk.dead)
        await asyncio.sleep(_LAST_WORDS_S)
        return
    desk.draining = True
    await _first(life.hurry.wait(), emptied(desk), timeout_s=shutdown_timeout_s)
    drop(desk, list(desk.tickets.values()), "the server is shutting down")
    await _first(emptied(desk), timeout_s=_LAST_WORDS_S)


async def _first(*events: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
    """Wait for any of *events*; for *timeout_s* at most."""
    tasks = [asyncio.ensure_future(one) for one in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
