"""Sums without NCCL: which message goes which way, and that whatever is wrong with them is left out by all ranks."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from agentinfer.ops import allreduce
from agentinfer.ops.allreduce import STAGING, Fast, path_of, push_most, start_fast
from agentinfer.ops.comm import Processes, Pulse, RankLost, connect, open_store
from agentinfer.ops.kernels import all_reduce as push
from agentinfer.ops.streams import norm, over_ranks, summed

CPU = torch.device("cpu")
KIB = 1 << 10


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_paths(size: int, dtype: torch.dtype) -> None:
    """By its size a message goes to our kernel, to torch or the plain way; limits are inclusive, and what is odd,
    unaligned, empty, not contiguous or of another dtype goes the plain way.
    """

    def path(count: int) -> str:
        return path_of(torch.empty(count // dtype.itemsize, dtype=dtype), size)

    staged = "plain" if dtype == torch.float16 else "two_shot"
    most = push_most(size)
    assert 8 * KIB < most <= push.MOST < STAGING
    assert [path(n) for n in (0, 16, 8 * KIB, most, most + 16)] == ["plain", "push", "push", "push", staged]
    assert [path(n) for n in (STAGING - 16, STAGING, STAGING + 16)] == [staged, staged, "plain"]
    assert [path(n * dtype.itemsize) for n in (1, 9)] == ["plain", "plain"]
    whole = torch.empty(1024, dtype=dtype)
    assert path_of(whole[1:9], size) == "plain"
    assert path_of(whole.view(32, 32).T, size) == "plain"
    assert path_of(whole.to(torch.int64), size) == "plain"


def test_two_ranks_push_what_decode_steps_sum() -> None:
    """Over two ranks 64 rows of 4,096 numbers in half precision are still one write into each other's memory."""
    assert path_of(torch.empty(64, 4096, dtype=torch.bfloat16), 2) == "push"


def over_gloo(work: Any) -> list[Any]:
    """*work*(comm, rank, store) of two ranks that are threads; their results."""
    store = open_store("127.0.0.1", 0, serve=True)

    def one(rank: int) -> Any:
        own = store if rank == 0 else open_store("127.0.0.1", store.port, serve=False)
        return work(connect(own, "test", rank, 2, CPU, Pulse(deadline_s=20.0)), rank, own)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def started(caplog: pytest.LogCaptureFixture) -> tuple[list[Any], list[str]]:
    """What both ranks got, and the warnings."""
    with caplog.at_level(logging.INFO):
        found = over_gloo(lambda comm, rank, store: start_fast(comm, rank, store, "fast", CPU))
    return found, [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_without_gpus_all_goes_the_plain_way(caplog: pytest.LogCaptureFixture) -> None:
    """What these devices can not do is one warning, and no error."""
    found, warnings = started(caplog)
    assert found == [None, None]
    assert len(warnings) == 1
    assert warnings[0].startswith("small messages go through NCCL, which is slower: ")


@pytest.mark.parametrize("part", ["_peers_missing", "_open", "_trial"])
@pytest.mark.parametrize("broken", [0, 1])
def test_what_fails_on_one_rank_is_used_by_none(
    part: str, broken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever part of the start raises, on whichever rank: nobody sums without NCCL, and there is one warning."""

    def stand_in(result: object, name: str) -> Any:
        def call(*arguments: Any) -> object:
            comm = next(x for x in arguments if isinstance(x, Processes))
            rank = comm._group.rank()
            if name == part and rank == broken:
                raise ZeroDivisionError("by a test")
            return result

        return call

    fast = Fast(0, 2, None, None, torch.zeros(1))
    for name, result in (("_peers_missing", ""), ("_open", fast), ("_trial", "")):
        monkeypatch.setattr(allreduce, name, stand_in(result, name))
    found, warnings = started(caplog)
    assert found == [None, None]
    assert len(warnings) == 1
    assert ("by a test" in warnings[0]) == (broken == 0)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_trial(wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Sums are compared with those of the process group, and used only if all of them are right."""

    def onto(fast: Any, parts: Tensor, residual: Tensor, *_: Any, patience: int) -> None:
        residual += fast.counters.plain_sum(parts[0])

    def by_group(fast: Any, x: Tensor, *, patience: int) -> Tensor:
        assert patience > 0
        total = fast.counters.plain_sum(x)
        if wrong and fast.rank == 1 and x.numel() > 1000:
            total[-1] += 1
        return total

    monkeypatch.setattr(allreduce, "_peers_missing", lambda *_: "")
    monkeypatch.setattr(allreduce, "STAGING", 64 * KIB)
    monkeypatch.setattr(allreduce, "_open", lambda comm, rank, *_: Fast(rank, 2, None, None, comm))
    monkeypatch.setattr(allreduce, "fast_sum", by_group)
    monkeypatch.setattr(allreduce, "fast_add_norm", onto)
    found, warnings = started(caplog)
    assert [fast is None for fast in found] == [wrong, wrong]
    assert len(warnings) == wrong


class Peers:
    """Sums four numbers by adding 100, and norms nothing but says what it was given."""

    def sum(self, x: Tensor) -> Tensor | None:
        return x + 100 if x.numel() == 4 else None

    def norms(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return (rows, width, dtype) == (2, 4, torch.float16)

    def add_norm(self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([len(parts), *residual.shape, len(weight), eps]).to(dtype)


def test_sums_and_norms_are_left_to_who_has_a_kernel_for_both() -> None:
    """A stream's pending parts stay as they are where one call sums over ranks and norms; else they are summed."""

    def work(comm: Processes, rank: int, _store: Any) -> bool:
        group, weight = comm.group(rank), torch.ones(4)
        parts = torch.arange(8.0).view(1, 2, 4).to(torch.float16)
        plain = over_ranks(torch.zeros(2, 4), parts, torch.float16, group)
        assert plain.unsummed is None
        assert torch.equal(plain.pending_TD, 2 * parts)
        comm.fast = Peers()
        left = over_ranks(torch.zeros(2, 4), parts, torch.float16, group)
        assert left.unsummed is group
        assert left.pending_TD is parts
        found, stream = norm(left, weight, torch.float16, 0.5, pdl=False)
        assert found.tolist() == [1, 2, 4, 4, 0.5]
        assert stream.pending_TD is stream.unsummed is None
        assert torch.equal(summed(left, torch.float16).pending_TD, 2 * parts)
        wide = over_ranks(torch.zeros(1, 4), parts[:, :1], torch.float16, group)
        assert wide.unsummed is None
        assert torch.equal(wide.pending_TD, parts[:, :1] + 100)
        calls = comm.pulse.calls
        comm.pulse.lost = "rank 1 died"
        with pytest.raises(RankLost, match="rank 1 died"):
            norm(left, weight, torch.float16, 0.5, pdl=False)
        assert comm.pulse.calls == calls
        return True

    assert over_gloo(work) == [True, True]


def test_processes_ask_it_first() -> None:
    """A sum goes the fast way where that gives one, is counted like any other, and raises once a rank is lost."""

    def work(comm: Processes, rank: int, _store: Any) -> bool:
        comm.fast = Peers()
        assert comm.all_reduce_sum(torch.zeros(4), rank).tolist() == [100.0] * 4
        assert comm.all_reduce_sum(torch.ones(5), rank).tolist() == [2.0] * 5
        assert comm.pulse.calls == 2
        comm.pulse.lost = "rank 1 died"
        with pytest.raises(RankLost, match="rank 1 died"):
            comm.all_reduce_sum(torch.zeros(4), rank)
        return True

    assert over_gloo(work) == [True, True]
