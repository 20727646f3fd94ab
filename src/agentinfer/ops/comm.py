"""Ranks and the collectives between them. The one module that may ever know torch.distributed.

A world of one touches none of it. `Processes` are ranks of a process each, over gloo or NCCL; in threads.py ranks are
threads of one process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from agentinfer.errors import AgentInferError


class RankLost(AgentInferError, RuntimeError):
    """A collective can not complete, because another rank died or did not come in time."""


class Comm(Protocol):
    """The collectives of one group of ranks. Every rank calls the same ones in the same order.

    No result aliases an argument, except in a world of one. All raise RankLost.
    """

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """The sum over the ranks of *x*, the same on every rank."""
        ...

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """`[.., d]` of every rank, in rank order, as `[.., d * size]`."""
        ...

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """The *x* of rank *source*. The others pass a tensor of that shape and dtype."""
        ...

    def watched(self, event: Happens) -> Happens:
        """*event*, which others have a part in, to be waited for no longer than they are there."""
        ...


class Alone:
    """A world of one: every collective is its argument itself, nothing is copied."""

    __slots__ = ()

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """See Comm. Returns *x*."""
        del rank
        return x

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """See Comm. Returns *x*."""
        del rank
        return x

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """See Comm. Returns *x*."""
        del source, rank
        return x

    def watched(self, event: Happens) -> Happens:
        """See Comm. Returns *event*."""
        return event


@define(eq=False)
class Pulse:
    """How far a rank has come. Mutable: its main thread writes it, the thread that watches reads it, and back."""

    deadline_s: float = 600.0
    """Seconds that a rank waits for others in one collective."""
    step: int = -1
    """The step that it launched last."""
    calls: int = 0
    """Collectives that it has begun."""
    since: float | None = None
    """When it began to wait in one (time.monotonic); None: it waits in none."""
    lost: str = ""
    """Which rank is gone, and why: whoever waits gives up. Empty: all is well."""


class Happens(Protocol):
    """What a GPU comes to: a torch.cuda.Event, or one that is waited for with others in mind."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


@frozen(eq=False)
class Watched:
    """An event that other ranks have a part in. To wait for it is to wait in a collective: *pulse* knows since when,
    and it ends once a rank is lost.
    """

    event: Happens
    pulse: Pulse

    def query(self) -> bool:
        """Whether it has happened."""
        return self.event.query()

    def synchronize(self) -> None:
        """Wait until it has. Raises RankLost."""
        self.pulse.since = time.monotonic()
        try:
            while not self.event.query():
                if self.pulse.lost:
                    raise RankLost(self.pulse.lost)
                time.sleep(_LOOK_S)
        finally:
            self.pulse.since = None


_LOOK_S = 2e-5
_SLICE = timedelta(milliseconds=200)
_WHO_S = 3.0


class Peers(Protocol):
    """GPUs of one host that write into each other's memory, and so sum small messages without NCCL."""

    def sum(self, x: Tensor) -> Tensor | None:
        """The sum of *x* over the ranks, a new tensor; None: it goes the plain way. Waits for nothing on the host."""
        ...

    def norms(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether `add_norm` serves so many rows of *width* numbers."""
        ...

    def add_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """The sum of *parts*, and over the ranks, rounded to *dtype*, goes onto *residual* in place; its norm, [T, D]
        of *dtype*, is new.
        """
        ...


class Processes:
    """The ranks are processes, which meet in a process group of torch: gloo on the host, NCCL between GPUs. Mutable:
    it holds connections, and tells *pulse* where it is.

    On the host a collective waits; one that others do not come to raises RankLost after `pulse.deadline_s`, or as soon
    as `pulse.lost` is set. On a GPU only the stream waits, so only its host can have a deadline.
    """

    __slots__ = ("_group", "_on_host", "fast", "pulse", "size")

    def __init__(self, group: Any, size: int, pulse: Pulse, *, on_host: bool) -> None:
        self._group = group
        self._on_host = on_host
        self.fast: Peers | None = None
        """What sums small messages without NCCL; None: nothing does."""
        self.pulse = pulse
        self.size = size

    def group(self, rank: int) -> Group:
        """This group as its member *rank*, which this process is, sees it."""
        return Group(rank, self.size, self)

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """See Comm. Every rank gets the same bits."""
        del rank
        if self.fast is not None:
            if self.pulse.lost:
                raise RankLost(self.pulse.lost)
            total = self.fast.sum(x)
            if total is not None:
                self.pulse.calls += 1
                return total
        return self.plain_sum(x)

    def add_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """`Peers.add_norm`, of shapes that it serves."""
        if self.pulse.lost or self.fast is None:
            raise RankLost(self.pulse.lost or "nothing sums and norms in one here")
        self.pulse.calls += 1
        return self.fast.add_norm(parts_PTD, residual_TD, weight_D, eps, dtype)

    def plain_sum(self, x: Tensor) -> Tensor:
        """`all_reduce_sum` by the process group: each number is summed in one place and sent to all."""
        total = x.clone(memory_format=torch.contiguous_format)
        self._wait(lambda: self._group.allreduce([total]))
        return total

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        del rank
        shown = x.new_empty((self.size, *x.shape))
        whole = x.contiguous()
        self._wait(lambda: self._group.allgather([list(shown.unbind())], [whole]))
        return torch.cat(shown.unbind(), dim=-1)

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """See Comm."""
        del rank
        options = _torch_distributed().BroadcastOptions()
        options.rootRank = source
        copy = x.clone(memory_format=torch.contiguous_format)
        self._wait(lambda: self._group.broadcast([copy], options))
        return copy

    def watched(self, event: Happens) -> Happens:
        """See Comm."""
        return Watched(event, self.pulse)

    def abandon(self) -> None:
        """Let no kernel of NCCL wait any longer; what was in the collectives is lost. Waits for nothing itself: an
        abort of NCCL can take long, if graphs hold its kernels.
        """
        if not self._on_host:
            _beside(self._group.abort)

    def close(self, within_s: float) -> str:
        """End the group, which all ranks do together, once nothing is in its collectives and no graph holds them. NCCL
        waits for both, and for the others; this rank does not wait for ever. What went wrong; empty: nothing.
        """
        if self._on_host:
            return ""
        ended, errors = _beside(self._group.shutdown)
        return "".join(map(str, errors)) if ended.wait(within_s) else f"it did not end within {within_s:g} s"

    def _wait(self, begin: Callable[[], Any]) -> None:
        if self.pulse.lost:
            raise RankLost(self.pulse.lost)
        self.pulse.calls += 1
        self.pulse.since = time.monotonic()
        try:
            work = begin()
            if self._on_host:
                self._wait_here(work, self.pulse.since + self.pulse.deadline_s)
            else:
                work.wait()
        except RuntimeError as error:
            raise RankLost(self._who(error)) from error
        finally:
            self.pulse.since = None

    def _wait_here(self, work: Any, until: float) -> None:
        """Return when *work* is done. In slices: nothing else can end a wait of gloo from outside."""
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed() or self.pulse.lost or time.monotonic() > until:
                    raise
            else:
                return

    def _who(self, error: RuntimeError) -> str:
        """Which rank is gone: the others' word for it, which comes a moment after a connection breaks."""
        until = time.monotonic() + _WHO_S
        while not self.pulse.lost and time.monotonic() < until:
            time.sleep(0.01)
        return self.pulse.lost or f"collective {self.pulse.calls} of {self.size} ranks failed: {error}"


def _beside(work: Callable[[], object]) -> tuple[threading.Event, list[Exception]]:
    """Have a thread of its own do *work*: what is set when it is done, and what it raised."""
    ended, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - for who asks; a group that is being given up is lost anyway
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="agentinfer-end", daemon=True).start()
    return ended, errors


def _torch_distributed() -> Any:
    """Imported by who has other ranks, and nobody else. Much of it is not typed."""
    return import_module("torch.distributed")


def open_store(host: str, port: int, *, serve: bool, wait_s: float = 60.0) -> Any:
    """The key-value store through which ranks find each other (torch's TCPStore).

    *serve*: this process holds it, at `.port`: a free one that the system picks if *port* is 0. Raises RankLost.
    """
    try:
        return _torch_distributed().TCPStore(host, port, None, serve, timedelta(seconds=wait_s), wait_for_workers=False)
    except RuntimeError as error:
        raise RankLost(f"no meeting point at {host}:{port}: {error}") from error


def connect(store: Any, name: str, rank: int, size: int, device: torch.device, pulse: Pulse) -> Processes:
    """The group *name* of *size* processes, all of which call this: over NCCL for a CUDA device, else over gloo.

    No default group of torch is made, so a process may be in several. Raises RankLost.
    """
    distributed = _torch_distributed()
    on_host = device.type != "cuda"
    try:
        own = distributed.PrefixStore(name, store)
        if on_host:
            group = distributed.ProcessGroupGloo(own, rank, size, timedelta(seconds=pulse.deadline_s))
        else:
            torch.cuda.set_device(device)
            options = distributed.ProcessGroupNCCL.Options()
            group = distributed.ProcessGroupNCCL(own, rank, size, options)
    except RuntimeError as error:
        raise RankLost(pulse.lost or f"rank {rank} can not join the {size} of {name}: {error}") from error
    return Processes(group, size, pulse, on_host=on_host)


@frozen(eq=False)
class Group:
    """The ranks that work on one thing together, as one of them sees it."""

    rank: int
    size: int
    comm: Comm

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum of *x* over the group; of one rank, *x* itself."""
        return x if self.size == 1 else self.comm.all_reduce_sum(x, self.rank)

    def sums_and_norms(self, rows: int, width: int, dtype: torch.dtype) -> Processes | None:
        """Whose `add_norm` sums so many rows over the group and norms them in one kernel; None: nobody's."""
        comm = self.comm
        if not isinstance(comm, Processes) or comm.fast is None or not comm.fast.norms(rows, width, dtype):
            return None
        return comm

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """`[.., d] -> [.., d * size]`; of one rank, *x* itself."""
        return x if self.size == 1 else self.comm.all_gather_last_dim(x, self.rank)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The *x* of rank *source*; of one rank, *x* itself."""
        return x if self.size == 1 else self.comm.broadcast(x, source, self.rank)


ONE: Final = Group(0, 1, Alone())
"""A group of one."""


@frozen(eq=False)
class Ranks:
    """Who takes part in a forward pass, and where this rank computes. An argument of forward, load and capture."""

    tp: Group
    ep: bool
    """Experts are spread over the ranks of `tp`, not cut by width."""
    device: torch.device
    parts: bool = False
    """Logits stay cut: each rank gives those of its own part of the vocabulary, padding included."""


def alone(device: str | torch.device = "cpu", *, ep: bool = False) -> Ranks:
    """One rank on *device*."""
    return Ranks(tp=ONE, ep=ep, device=torch.device(device))
