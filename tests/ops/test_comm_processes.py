"""Collectives over gloo. The ranks are threads of this process here: each has a process group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from agentinfer.ops.allreduce import fits_peer_buffer
from agentinfer.ops.comm import Group, Processes, Pulse, RankLost, Watched, connect, open_store
from agentinfer.ops.linear import embedding, head, row_parallel

CPU = torch.device("cpu")


def run(size: int, work: Callable[[Group], Any], deadline_s: float = 20.0) -> list[Any]:
    """*work* on each of *size* ranks, in rank order: what it returned, or the RankLost it raised."""
    store = open_store("127.0.0.1", 0, serve=True)

    def one(rank: int) -> Any:
        own = store if rank == 0 else open_store("127.0.0.1", store.port, serve=False)
        comm = connect(own, "test", rank, size, CPU, Pulse(deadline_s=deadline_s))
        try:
            return work(comm.group(rank))
        except RankLost as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_over_gloo(size: int) -> None:
    """Sums, gathers and broadcasts are right on every rank, for each dtype, odd sizes, views and nothing at all."""

    def work(group: Group) -> bool:
        mine = float(group.rank + 1)
        total = float(size * (size + 1) // 2)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            for shape in ((1,), (7,), (3, 5), (2, 0)):
                x = torch.full(shape, mine).to(dtype)
                assert torch.equal(group.all_reduce_sum(x), torch.full(shape, total).to(dtype))
                assert torch.equal(x, torch.full(shape, mine).to(dtype))  # an argument is not written
                ranks = torch.arange(1, size + 1).repeat_interleave(shape[-1]).to(dtype)
                assert torch.equal(group.all_gather_last_dim(x), ranks.expand(*shape[:-1], -1))
                for source in range(size):
                    assert torch.equal(group.broadcast(x, source), torch.full(shape, source + 1.0).to(dtype))
        across = torch.arange(6.0).view(2, 3).T * mine
        return torch.equal(group.all_reduce_sum(across), torch.arange(6.0).view(2, 3).T * total)

    assert run(size, work) == [True] * size


@pytest.mark.parametrize("size", [2, 4])
def test_parallel_layers_over_gloo_are_those_of_one_rank(size: int) -> None:
    """A row-parallel product, a cut embedding and a cut head of a padded vocabulary equal the whole ones."""
    noise = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=noise) for shape in ((5, 16), (6, 16), (6,)))
    table = torch.randn(11, 6, generator=noise)
    ids = torch.tensor([0, 10, 3, 7, 5])

    def work(group: Group) -> list[torch.Tensor]:
        cut = slice(group.rank * 16 // size, (group.rank + 1) * 16 // size)
        rows = -(-11 // size)
        padded = torch.zeros(rows * size, 6)
        padded[:11] = table
        mine = padded[group.rank * rows : (group.rank + 1) * rows]
        y = row_parallel(x[:, cut].contiguous(), weight[:, cut].contiguous(), bias, group)
        return [y, embedding(ids, mine, group), head(y, mine, group, 11)]

    y = x @ weight.T + bias
    for found in run(size, work):
        for got, want in zip(found, (y, table[ids], y @ table.T), strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_every_rank_gets_the_same_bits() -> None:
    """A sum whose order matters is the same on all ranks, bit for bit."""
    parts = torch.randn(4, 1001, generator=torch.Generator().manual_seed(1))
    sums = run(4, lambda group: group.all_reduce_sum(parts[group.rank]))
    assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_a_collective_to_which_a_rank_does_not_come_is_given_up() -> None:
    """Who waits longer than the deadline raises RankLost, and can tell how far it came."""
    pulses: list[Pulse] = []

    def work(group: Group) -> None:
        if group.rank == 0:
            comm = group.comm
            assert isinstance(comm, Processes)
            pulses.append(comm.pulse)
            comm.pulse.deadline_s = 0.5
            group.all_reduce_sum(torch.ones(1))

    begin = time.monotonic()
    lost, _ = run(2, work)
    assert isinstance(lost, RankLost)
    assert time.monotonic() - begin < 10
    assert (pulses[0].calls, pulses[0].since) == (1, None)


def test_who_waits_gives_up_as_soon_as_a_rank_is_known_to_be_lost() -> None:
    """Setting pulse.lost ends a wait within a second, and every collective that is called later, with its words."""

    def work(group: Group) -> tuple[str, str] | None:
        if group.rank:
            time.sleep(1.5)
            return None
        comm = group.comm
        assert isinstance(comm, Processes)
        pulse = comm.pulse
        threading.Timer(0.3, lambda: setattr(pulse, "lost", "rank 1 was eaten")).start()
        said = []
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(RankLost) as caught:
                group.all_reduce_sum(torch.ones(1))
            assert time.monotonic() - begin < 1.2
            said.append(str(caught.value))
        return said[0], said[1]

    assert run(2, work)[0] == ("rank 1 was eaten", "rank 1 was eaten")


def test_two_groups_in_one_process_do_not_meet() -> None:
    """No group is torch's default one, so several live side by side."""
    first = run(2, lambda group: group.all_reduce_sum(torch.ones(1)).item())
    assert first == run(2, lambda group: group.all_reduce_sum(torch.ones(1)).item()) == [2.0, 2.0]
    assert not torch.distributed.is_initialized()  # noqa: TID251 - asks only


def test_a_store_that_is_not_there_is_said() -> None:
    """No store at the address: RankLost names it."""
    with pytest.raises(RankLost, match=r"no meeting point at 127\.0\.0\.1:9"):
        open_store("127.0.0.1", 9, serve=False, wait_s=1.0)


MIB = 1 << 20


def test_what_fits_a_peer_buffer() -> None:
    """Only whole 16-byte units from an aligned start, contiguous, of a listed dtype, not empty, up to the buffer."""
    listed = (torch.bfloat16, torch.float16)

    def fits(x: torch.Tensor) -> bool:
        return fits_peer_buffer(x, 8 * MIB, listed)

    def made(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    assert [fits(made(4 * MIB + more)) for more in (-8, 0, 8)] == [True, True, False]
    assert [fits(made(count)) for count in (0, 1, 7, 8, 9, 16)] == [False, False, False, True, False, True]
    assert not fits(made(64)[1:57])  # 112 bytes that begin 2 bytes in
    assert fits(made(64)[8:])
    assert not fits(made(64).view(8, 8).T)
    assert not fits(made(64, torch.float32))
    assert fits(made(64, torch.float16))


def test_nothing_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of somebody else change nothing."""
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert run(2, lambda group: group.all_reduce_sum(torch.ones(1)).item()) == [2.0, 2.0]


class Coming:
    """An event that has happened once it was asked for so often; None: it never does."""

    def __init__(self, after: int | None, pulse: Pulse) -> None:
        self.left, self.pulse, self.since = after, pulse, list[float | None]()

    def query(self) -> bool:
        self.since.append(self.pulse.since)
        if self.left is None:
            self.pulse.lost = "rank 1 died" if len(self.since) > 5 else ""
            return False
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait without an end")


def test_an_event_is_waited_for_as_a_collective_is() -> None:
    """Who waits says since when, and no longer once it is over; once a rank is lost the wait ends and names it."""
    pulse = Pulse()
    event = Coming(3, pulse)
    Watched(event, pulse).synchronize()
    assert len(event.since) == 4
    assert None not in event.since
    assert pulse.since is None
    with pytest.raises(RankLost, match="rank 1 died"):
        Watched(Coming(None, pulse), pulse).synchronize()
    assert pulse.since is None


class _Group:
    """A process group whose end takes as long as the test lets it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.called, self.error = threading.Event(), list[str](), error

    def _end(self, how: str) -> None:
        self.called.append(how)
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self._end("shutdown")

    def abort(self) -> None:
        self._end("abort")


def test_a_group_of_gpus_is_shut_down_with_a_deadline() -> None:
    """At a normal end it is shut down, and what went wrong is said; one that hangs is not waited for."""
    group = _Group()
    comm = Processes(group, 2, Pulse(), on_host=False)
    assert comm.close(0.05) == "it did not end within 0.05 s"
    group.go.set()
    assert comm.close(30.0) == ""
    group.error = RuntimeError("remote process exited")
    assert comm.close(30.0) == "remote process exited"
    assert group.called == ["shutdown"] * 3


def test_to_abandon_a_group_waits_for_nothing() -> None:
    """An abort that hangs keeps nobody; what it raises is not said: the group is lost anyway."""
    group = _Group(RuntimeError("aborted"))
    begin = time.monotonic()
    Processes(group, 2, Pulse(), on_host=False).abandon()
    assert time.monotonic() - begin < 5.0
    group.go.set()
    until = time.monotonic() + 30
    while not group.called and time.monotonic() < until:
        time.sleep(0.01)
    assert group.called == ["abort"]


def test_a_group_of_hosts_has_no_end_of_its_own() -> None:
    """Over gloo nothing is shut down and nothing aborted."""
    group = _Group()
    comm = Processes(group, 2, Pulse(), on_host=True)
    comm.abandon()
    assert comm.close(0.0) == ""
    assert group.called == []
