"""Ranks that are threads of one process, so that tensor parallelism is testable anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from agentinfer.ops.comm import Group, Happens, RankLost

T = TypeVar("T")


class Threads:
    """The ranks are threads of this process, which meet at a barrier. Mutable on purpose.

    A rank that raises inside `run` (or calls `abort`) breaks the barrier for good: the others get RankLost instead of
    waiting. One that stays away longer than `deadline_s` does the same.
    """

    __slots__ = ("_barrier", "_cause", "_deadline_s", "_slots", "size")

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size = size
        self._deadline_s = deadline_s
        self._barrier = threading.Barrier(size)
        self._slots: list[Tensor | None] = [None] * size
        self._cause = ""

    @classmethod
    def of(cls, size: int, deadline_s: float = 60.0) -> Threads:
        """A group of *size* ranks."""
        if size < 1:
            raise ValueError(f"a group needs at least one rank, not {size}")
        return cls(size, deadline_s)

    def group(self, rank: int) -> Group:
        """This group as its member *rank* sees it."""
        return Group(rank, self.size, self)

    def abort(self, cause: str) -> None:
        """Every collective, waiting now or called later, raises RankLost with *cause*."""
        self._cause = self._cause or cause
        self._barrier.abort()

    def run(self, work: Callable[[Group], T]) -> list[T]:
        """Call *work* once for each rank, each in its own thread; the results in rank order.

        Raises the error of the first rank that failed by itself (not of those that only lost it).
        """

        def guarded(rank: int) -> T:
            try:
                return work(self.group(rank))
            except BaseException as error:
                self.abort(f"rank {rank} raised {type(error).__name__}: {error}")
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, RankLost)), errors[0])
        return [future.result() for future in futures]

    def _meet(self) -> None:
        try:
            self._barrier.wait(self._deadline_s)
        except threading.BrokenBarrierError:
            cause = self._cause or f"a rank did not come within {self._deadline_s} s"
            raise RankLost(f"collective of {self.size} ranks given up: {cause}") from None

    def _exchange(self, x: Tensor, rank: int, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Show *x* to all ranks, combine what they show; nobody goes on before all have read."""
        self._slots[rank] = x
        self._meet()
        result = combine([slot for slot in self._slots if slot is not None])
        self._meet()
        return result

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """See Comm. Summed in rank order in float32 (float64 stays), so every rank gets the same bits."""
        if self.size == 1:
            return x

        def add(shown: list[Tensor]) -> Tensor:
            wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = shown[0].to(wide, copy=True)
            for other in shown[1:]:
                total += other
            return total.to(x.dtype)

        return self._exchange(x, rank, add)

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        return x if self.size == 1 else self._exchange(x, rank, lambda shown: torch.cat(shown, dim=-1))

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """See Comm."""
        return x if self.size == 1 else self._exchange(x, rank, lambda shown: shown[source].clone())

    def watched(self, event: Happens) -> Happens:
        """See Comm. Returns *event*."""
        return event
