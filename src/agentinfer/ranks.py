"""One engine of several processes: how they start, meet and end. What they do meanwhile: lead.py."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from attrs import define, field, frozen

from agentinfer.build import Settings, build, device_of
from agentinfer.errors import AgentInferError, InvalidSetting
from agentinfer.lead import LOAD_S, Diverged, Lead, follow
from agentinfer.lifeline import Lifeline, accept, dial, listen
from agentinfer.loop import Engine, open_engine, start
from agentinfer.models.model import read_config
from agentinfer.ops.comm import Pulse, RankLost, Ranks, connect, open_store
from agentinfer.sampling import Processor
from agentinfer.state.engine import digest
from agentinfer.swap import Source
from agentinfer.text import eos_union, load_text

_log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for a process to start, torch to be imported, and all to find each other."""
STEP_S = 60.0
"""Seconds that a rank may keep others waiting in a step, unless told."""
_END_S = 5.0


@frozen
class Place:
    """Where a process stands among the ranks, and where they meet. All that a launcher has to know."""

    rank: int
    size: int
    local_rank: int
    """Which GPU of its host is its own."""
    host: str
    """The address of the store, of torch's kind, and of rank 0."""
    port: int
    serve: bool
    """This process holds the store."""
    run: str
    """Names this start: another one that meets at the same store does not get in its way."""


@contextmanager
def open_ranks(
    folder: str | Path,
    settings: Settings,
    tp: int,
    place: Place | None = None,
    *,
    processors: Mapping[str, Processor] = MappingProxyType({}),
    step_timeout_s: float = STEP_S,
    leave: Callable[[str], None] = lambda _cause: None,
) -> Generator[Engine]:
    """An engine whose model is shared by *tp* processes, of which this one is rank 0. They end with the block.

    *place*: of rank 0, where a launcher starts the others; None: they are children of this process, on this host.
    *processors*: as of open_engine; rank 0 alone calls them. *step_timeout_s*: how long a rank may keep the others
    waiting. *leave*: called with the cause, by another thread, if a rank was lost and the block does not end.
    Raises InvalidSetting, CheckpointError; RankLost naming the rank that died, raised or did not come, and then the
    engine is of no use any more.
    """
    if tp == 1:
        yield open_engine(folder, settings, processors=processors)
        return
    folder = Path(folder)
    model = read_config(folder)
    model.packed_on(tp, ep=settings.ep)  # what can not be shared is said before anybody starts
    check_device(settings, tp if place is None else 1)
    text, pulse = load_text(folder), Pulse(deadline_s=LOAD_S)
    eos = eos_union((), text)
    with ExitStack() as stack:
        here = place if place is not None else Place(0, tp, 0, "127.0.0.1", 0, serve=True, run=secrets.token_hex(8))
        store = open_store(here.host, here.port, serve=here.serve)
        job = {"folder": str(folder), "settings": attrs.asdict(settings), "eos": eos, "timeout_s": step_timeout_s}
        listener = stack.enter_context(listen(_own_address(here, store.port)))
        key, (host, port) = secrets.token_hex(16), listener.getsockname()[:2]
        store.set(f"{here.run}/rank0", json.dumps({"host": host, "port": port, "key": key}))
        children = _Children()
        stack.callback(children.end)
        if place is None:
            children.begin(
                [attrs.evolve(here, rank=r, local_rank=r, port=store.port, serve=False) for r in range(1, tp)], job
            )
        lifeline = accept(listener, key, pulse, tp, START_S, children.gone)
        lifeline.died, lifeline.leave = children.fate, leave
        stack.enter_context(_held(lifeline))
        with _threads(settings, tp), _joined(settings, here, store, lifeline) as shared:
            machine, device = build(folder, settings, eos, ranks=shared)
            engine = start(attrs.evolve(machine, host=attrs.evolve(machine.host, processors=processors)), device, text)
            del machine, device  # the engine's alone, which gives them up at the end
            pulse.deadline_s = step_timeout_s
            lead = Lead(lifeline.tell, pulse)
            engine.lead, engine.others = lead, lead.beside
            yield engine
            lifeline.check()
            lead.tell({"end": digest(engine.world.state), "events": lead.waiting})
            engine.machine = attrs.evolve(engine.machine, replay=None)  # NCCL's end waits for graphs of its kernels
        lifeline.await_goodbyes(_END_S)


def follow_rank(
    folder: Path,
    settings: Settings,
    eos: tuple[int, ...],
    place: Place,
    step_timeout_s: float,
    weights: Callable[[], Source] | None = None,
) -> None:
    """Be a rank that is not 0, until rank 0 ends. *weights*: gives this rank's own whenever rank 0 swaps to others than
    a folder's. Raises what open_ranks does, Diverged, and what a step raises.
    """
    pulse = Pulse(deadline_s=LOAD_S)
    store = open_store(place.host, place.port, serve=False, wait_s=START_S)
    met = json.loads(store.get(f"{place.run}/rank0"))
    lifeline = dial(met["host"], met["port"], met["key"], place.rank, place.size, pulse)
    lifeline.died = lambda _rank: "rank 0 died"
    lifeline.leave = lambda _cause: _leave(1)
    with _held(lifeline), _threads(settings, place.size), _joined(settings, place, store, lifeline) as shared:
        machine, device = build(folder, settings, eos, ranks=shared)
        pulse.deadline_s = step_timeout_s
        follow(machine, device, lifeline.told(), pulse, weights)
        del machine  # and its graphs, for which NCCL's end would wait


def check_device(settings: Settings, tp: int) -> None:
    """Whether each of the *tp* ranks of this host has a device of its own. Raises InvalidSetting."""
    device = device_of(settings.device)
    if ":" in settings.device:
        raise InvalidSetting("device", f"{settings.device!r}: each rank takes its own; give cuda or cpu")
    if device.type == "cuda" and torch.cuda.device_count() < tp:
        raise InvalidSetting("tp", f"{tp} ranks, but this machine has {torch.cuda.device_count()} CUDA devices")


@contextmanager
def _joined(settings: Settings, place: Place, store: Any, lifeline: Lifeline) -> Generator[Ranks]:
    """All ranks, once they have joined. They part at the end of the block, unless it raises: then the lifeline has them
    give up.
    """
    device = device_of(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank)
    comm = connect(store, f"{place.run}/tp", place.rank, place.size, device, lifeline.pulse)
    lifeline.give_up = comm.abandon
    lifeline.check()
    if device.type == "cuda":
        from agentinfer.ops.allreduce import start_fast

        comm.fast = start_fast(comm, place.rank, store, f"{place.run}/fast", device)
    yield Ranks(comm.group(place.rank), ep=settings.ep, device=device)
    if why := comm.close(_END_S):
        _log.warning("the group of rank %d was not shut down: %s", place.rank, why)


@contextmanager
def _held(lifeline: Lifeline) -> Generator[None]:
    """Watch for the time of a block. What it raises, all others hear."""
    lifeline.begin()
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, RankLost | Diverged) else ""
        lifeline.lose(said or f"rank {lifeline.rank} raised {type(error).__name__}: {error}")
        raise
    finally:
        lifeline.close()


@contextmanager
def _threads(settings: Settings, size: int) -> Generator[None]:
    """Ranks on one CPU share its cores."""
    before = torch.get_num_threads()
    if device_of(settings.device).type == "cpu":
        torch.set_num_threads(max(1, before // size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own_address(place: Place, port: int) -> str:
    """The address of this host that the others, who know the store's, can call."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, port))  # sends nothing: only asks which way it would go
        return str(probe.getsockname()[0])


_CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # ctrl-c reaches them too, and rank 0 decides
    "from agentinfer.ranks import child; child()"
)


@define(eq=False)
class _Children:
    """Ranks that are children of this process. Mutable."""

    running: dict[int, subprocess.Popen[bytes]] = field(factory=dict[int, subprocess.Popen[bytes]])

    def begin(self, places: Iterable[Place], job: Mapping[str, Any]) -> None:
        """Start one at each of *places*. Its standard output is this process's standard error."""
        for place in places:
            process = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=2)  # noqa: S603
            self.running[place.rank] = process
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended already: `gone` says so
                    process.stdin.write(json.dumps({**job, "place": attrs.asdict(place)}).encode() + b"\n")
                    process.stdin.flush()  # and stays open: its end is the end of this process

    def gone(self) -> str:
        """Who has ended already, in words; empty: nobody."""
        return next((self.fate(rank) for rank, process in self.running.items() if process.poll() is not None), "")

    def fate(self, rank: int) -> str:
        """How *rank*, whose connections broke, came to its end."""
        process = self.running.get(rank)
        if process is None:
            return f"rank {rank} died"
        try:
            status = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"rank {rank} (process {process.pid}) broke its connection"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"rank {rank} (process {process.pid}) {how}"

    def end(self) -> None:
        """Wait until all have ended, but not for long."""
        until = time.monotonic() + _END_S
        for process in self.running.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # of a job that was never read
                    process.stdin.close()


def child() -> None:
    """The main function of a process that _Children started; what it is to do stands in its standard input."""
    job = json.loads(sys.stdin.readline())
    status, rank = 1, job["place"]["rank"]
    threading.Thread(target=_outlived, args=(rank,), daemon=True).start()
    try:
        settings, place = Settings(**job["settings"]), Place(**job["place"])
        follow_rank(Path(job["folder"]), settings, tuple(job["eos"]), place, job["timeout_s"])
        status = 0
    except RankLost as error:
        if str(error).startswith("rank 0 "):  # which can not say so itself
            sys.stderr.write(f"agentinfer: rank {rank}: {error}\n")
    except AgentInferError:
        pass  # rank 0 has been told, and says it
    except BaseException:  # noqa: BLE001 - whatever it is, this process ends
        traceback.print_exc()
    _leave(status)


def _outlived(rank: int) -> None:
    """End with the process that started this one, even before there is a lifeline. For a thread of its own."""
    sys.stdin.read()
    time.sleep(2.0)  # whoever can say more does so first
    sys.stderr.write(f"agentinfer: rank {rank}: rank 0 died\n")
    _leave(1)


def _leave(status: int) -> None:
    """End this process at once, whatever its other threads wait for."""
    sys.stderr.flush()
    os._exit(status)
