"""The HTTP side: the event loop's end of the mail, uvicorn, signals, and the end of all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from attrs import define, field, frozen
from starlette.datastructures import Headers

from agentinfer.server.app import make_app
from agentinfer.server.connection import TimedConnection
from agentinfer.server.desk import Desk, Queues, Ticket, drop, emptied, hear
from agentinfer.server.guard import Keys
from agentinfer.server.mail import Command, Died
from agentinfer.server.metrics import Metrics
from agentinfer.server.site import Quotas, Site
from agentinfer.server.tools import format_of
from agentinfer.text import Text

_log = logging.getLogger(__name__)
_LAST_WORDS_S: Final = 2.0
"""For answers to those who waited when the engine died, and for health checks to see it."""
_CLOSE_S: Final = 5.0
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_FORMS: Final = 16


@frozen
class Facts:
    """What never changes of the engine, as plain data."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int


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
    trace: str | None = None
    """The file in which the engine is recorded, if it is."""
    apart: bool = False
    """Answer in a process of its own."""
    otlp_traces_endpoint: str | None = None
    """The URL that a span of each request is sent to; needs the extra `otel`."""


def make_desk(post: Callable[[Command], None], facts: Facts, options: Options) -> Desk:
    """The event loop's end of the mail that *post* sends."""
    queues = Queues(
        options.max_queued or 4 * facts.max_num_seqs,
        options.max_queued_tokens or 4 * facts.num_blocks * facts.block_size,
    )
    return Desk(post, queues, Metrics(num_free_blocks=facts.num_blocks, num_blocks=facts.num_blocks))


async def attend(
    desk: Desk,
    listener: socket.socket,
    text: Text | None,
    facts: Facts,
    options: Options,
    ready: Callable[[Callable[[], object]], None],
) -> None:
    """Answer on *listener* until a signal comes, the function that *ready* is given is called, or the engine dies.

    Raises OSError if others listen there.
    """
    loop, life = asyncio.get_running_loop(), _Life()
    with ThreadPoolExecutor(2, "agentinfer-text") as pool, _farewells(options) as farewell:
        site = Site(
            desk=desk,
            text=text,
            names=options.names,
            created=int(time.time()),
            max_model_len=facts.max_model_len,
            quotas=options.quotas,
            form=format_of(text, options.parser),
            pool=pool,
            form_slots=asyncio.Semaphore(_MAX_FORMS),
            max_stall_s=options.max_stall_s,
            ui=options.ui,
            trace=None if options.trace is None else Path(options.trace),
            farewell=farewell,
        )
        server = _Server(_config(site, options), partial(ready, lambda: loop.call_soon_threadsafe(_end, life)))
        with _signals(life):
            serving = asyncio.create_task(server.serve([listener]))
            await _until_the_end(desk, life, serving, options.shutdown_timeout_s)
            server.should_exit = True
            await serving


@contextlib.contextmanager
def _farewells(options: Options) -> Generator[Callable[[Headers], Callable[[Ticket], None]] | None]:
    """What `Site.farewell` is, where spans are asked for."""
    if options.otlp_traces_endpoint is None:
        yield None
        return
    from agentinfer.server.spans import farewell, sent_to

    with sent_to(options.otlp_traces_endpoint) as tracer:
        yield partial(farewell, tracer, options.names[0])


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


async def _until_the_end(desk: Desk, life: _Life, serving: asyncio.Task[None], shutdown_timeout_s: float) -> None:
    """Wait for a signal or the engine's death; then until those who are being served are, or their time is up. Where
    *serving* has failed there is nothing to wait for.
    """
    await _first(life.ending.wait(), desk.death.wait(), asyncio.wait((serving,)))
    if serving.done():
        return
    if desk.dead is not None:
        _log.error("the engine has failed: %s", desk.dead)
        await asyncio.sleep(_LAST_WORDS_S)
        return
    desk.draining = True
    await _first(life.hurry.wait(), emptied(desk), timeout_s=shutdown_timeout_s)
    drop(desk, list(desk.tickets.values()), "the server is shutting down")
    await _first(emptied(desk), timeout_s=_LAST_WORDS_S)
    if desk.tickets:  # the engine has not even heard that they are aborted
        hear(desk, [Died("a step has not ended")])


async def _first(*events: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
    """Wait for any of *events*; for *timeout_s* at most."""
    tasks = [asyncio.ensure_future(one) for one in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
