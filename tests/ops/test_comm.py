"""Ranks and collectives."""

from __future__ import annotations

import time

import pytest
import torch

from agentinfer.ops.comm import Alone, Group, RankLost, alone
from agentinfer.ops.threads import Threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_is_the_sum_of_all_ranks_on_every_rank(size: int) -> None:
    """Every rank gets the sum of what all ranks gave, bit for bit the same, many times in a row."""

    def work(group: Group) -> list[torch.Tensor]:
        return [group.all_reduce_sum(torch.full((2, 3), float(10**group.rank) + turn)) for turn in range(20)]

    results = Threads.of(size).run(work)
    for turn in range(20):
        want = torch.full((2, 3), float(sum(10**r + turn for r in range(size))))
        assert all(torch.equal(rank[turn], want) for rank in results)


def test_all_reduce_of_bf16_accumulates_in_float32() -> None:
    """A bf16 sum over ranks is rounded once, at the end."""
    parts = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    results = Threads.of(4).run(lambda group: group.all_reduce_sum(parts[group.rank : group.rank + 1]))
    assert [r.item() for r in results] == [260.0] * 4
    assert results[0].dtype == torch.bfloat16


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_joins_the_last_dimension_in_rank_order(size: int) -> None:
    """[.., d] of each rank becomes [.., d * size], rank 0 first."""
    results = Threads.of(size).run(lambda group: group.all_gather_last_dim(torch.full((2, 2), group.rank)))
    want = torch.arange(size).repeat_interleave(2).expand(2, -1)
    assert all(torch.equal(r, want) for r in results)


@pytest.mark.parametrize("source", [0, 1, 2])
def test_broadcast_gives_the_source_to_all(source: int) -> None:
    """Every rank gets what the source gave, in memory of its own."""
    results = Threads.of(3).run(lambda group: group.broadcast(torch.tensor([group.rank, 7]), source))
    assert [r.tolist() for r in results] == [[source, 7]] * 3
    assert len({r.data_ptr() for r in results}) == 3


def test_arguments_may_be_overwritten_as_soon_as_a_collective_returns() -> None:
    """No rank still reads an argument after any rank has returned, and no result aliases an argument."""

    def work(group: Group) -> list[float]:
        x = torch.ones(10_000)
        seen = []
        for _ in range(30):
            x.fill_(1)
            total = group.all_reduce_sum(x)
            x.fill_(99)
            seen.append(total.sum().item())
        return seen

    assert Threads.of(3).run(work) == [[30_000.0] * 30] * 3


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_a_rank_that_raises_ends_the_others(guilty: int) -> None:
    """When a rank raises the others get RankLost at once, and run raises the guilty rank's own error."""
    lost: list[str] = []

    def work(group: Group) -> None:
        try:
            group.all_reduce_sum(torch.ones(1))
            if group.rank == guilty:
                raise KeyError("out of luck")
            group.all_reduce_sum(torch.ones(1))
        except RankLost as error:
            lost.append(str(error))
            raise

    began = time.monotonic()
    with pytest.raises(KeyError, match="out of luck"):
        Threads.of(3, deadline_s=30).run(work)
    assert time.monotonic() - began < 10
    assert len(lost) == 2
    assert all(f"rank {guilty} raised KeyError" in message for message in lost)


def test_a_rank_that_returns_early_ends_the_others_after_the_deadline() -> None:
    """A collective that a rank never joins gives up after the deadline."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.broadcast(torch.ones(1))

    with pytest.raises(RankLost, match=r"did not come within 0\.2 s"):
        Threads.of(2, deadline_s=0.2).run(work)


def test_a_world_of_one_copies_nothing() -> None:
    """With one rank every collective is its argument itself."""
    group = alone().tp
    x = torch.ones(3)
    assert group.all_reduce_sum(x) is x
    assert group.all_gather_last_dim(x) is x
    assert group.broadcast(x) is x
    for comm in (Alone(), Threads.of(1)):
        assert comm.all_reduce_sum(x, 0) is x
        assert comm.all_gather_last_dim(x, 0) is x
        assert comm.broadcast(x, 0, 0) is x
    with pytest.raises(ValueError, match="at least one rank"):
        Threads.of(0)
