"""One rank of a test of sums between GPUs: `all_reduce_rank.py RANK SIZE PORT`. Raises where a sum is wrong."""

from __future__ import annotations

import logging
import sys

import torch
from torch import Tensor

from agentinfer.ops.allreduce import STAGING, Fast, fast_add_norm, fast_sum, path_of, push_most, start_fast
from agentinfer.ops.comm import Processes, Pulse, connect, open_store
from agentinfer.ops.kernels.add_norm import add_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def opened(rank: int, size: int, port: int) -> tuple[Processes, Fast]:
    """This rank's group over NCCL, and its sums without."""
    device = torch.device("cuda", rank)
    store = open_store("127.0.0.1", port, serve=rank == 0)
    comm = connect(store, "test", rank, size, device, Pulse())
    fast = start_fast(comm, rank, store, "test/fast", device)
    assert fast is not None, "sums went through NCCL: the log says why"
    return comm, fast


def parts(shape: tuple[int, ...], dtype: torch.dtype, fast: Fast, seed: int) -> list[Tensor]:
    """What each rank brings, the same on all of them."""
    device = fast.counters.device
    return [
        torch.randn(shape, generator=torch.Generator(device).manual_seed(seed * 10 + r), device=device).to(dtype)
        for r in range(fast.size)
    ]


def sums(fast: Fast) -> None:
    """Of all sizes up to the largest of each way, called one after the other without waiting, are float32's."""
    most = push_most(fast.size)
    sizes = [16, 8 << 10, 512 << 10, (512 << 10) + 16, 1 << 20, most - 16, most, most + 16, STAGING - 16, STAGING]
    found: list[tuple[Tensor, Tensor]] = []
    for i, count in enumerate(sizes * 3):
        for dtype in DTYPES:
            each = parts((count // dtype.itemsize,), dtype, fast, i)
            got = fast_sum(fast, each[fast.rank])
            assert (got is None) == (path_of(each[0], fast.size) == "plain")
            if got is not None:
                found.append((got, sum(x.float() for x in each)))
    for got, want in found:
        torch.testing.assert_close(got.float(), want, rtol=1.6e-2 if got.dtype != torch.float32 else 1e-6, atol=1e-2)


def same_bits(comm: Processes, fast: Fast) -> None:
    """On all ranks."""
    for count in (4096, 30_000, 2 << 20):
        got = fast_sum(fast, parts((count,), torch.bfloat16, fast, 3)[fast.rank])
        assert got is not None
        each = comm.all_gather_last_dim(got, fast.rank).view(fast.size, -1)
        assert all(torch.equal(each[0], other) for other in each)


def norms(comm: Processes, fast: Fast) -> None:
    """The sum and the norm in one, for rows of decode steps, in a graph replayed beside other sums: the bits of the sum
    by NCCL, added and normed.
    """
    device, dtype = fast.counters.device, torch.bfloat16
    for rows, width, split in ((1, 4096, 1), (64, 4096, 4), (256, 4096, 2), (7, 1536, 1), (256, 1024, 1)):
        weight = torch.linspace(0.5, 1.5, width, device=device).to(dtype)
        own = parts((split, rows, width), torch.float32, fast, rows)[fast.rank].to(
            dtype if split == 1 else torch.float32
        )
        residual, x = torch.ones(rows, width, device=device), torch.ones(64, 4096, dtype=dtype, device=device)

        def step(own: Tensor = own, residual: Tensor = residual, weight: Tensor = weight, x: Tensor = x) -> Tensor:
            fast_sum(fast, x)
            return fast_add_norm(fast, own, residual, weight, 1e-6, dtype)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        total = comm.plain_sum(own.sum(0, dtype=torch.float32).to(dtype))
        want = torch.ones(rows, width, device=device)
        for _ in range(51):  # the first was eager
            normed = add_norm(want, total[None], weight, 1e-6, dtype)
        for _ in range(50):
            graph.replay()
        assert torch.equal(residual, want), (rows, width, split)
        assert torch.equal(found, normed)


def in_graphs(fast: Fast, replays: int = 2000) -> None:
    """Replayed many times, with eager sums in between, sums stay those of what is in the input at the time."""
    x = torch.zeros(64, 4096, dtype=torch.bfloat16, device=fast.counters.device)
    large = torch.zeros(768, 4096, dtype=torch.bfloat16, device=x.device)
    graph = torch.cuda.CUDAGraph()
    middle = torch.zeros(256, 4096, dtype=torch.bfloat16, device=x.device)
    for warm in (x, middle, large):
        fast_sum(fast, warm)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(5):
            y = fast_sum(fast, y)
        z, w = fast_sum(fast, large), fast_sum(fast, middle)
    assert z is not None
    assert w is not None
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(replays):
        x.fill_(i % 7 + fast.rank)
        large.fill_(i % 5 - fast.rank)
        middle.fill_(i % 3 + fast.rank)
        graph.replay()
        ranks = sum(range(fast.size))
        wrong += (y != (fast.size * (i % 7) + ranks) * fast.size**4).sum() + (z != fast.size * (i % 5) - ranks).sum()
        wrong += (w != fast.size * (i % 3) + ranks).sum()
        if i % 100 == 0:
            fast_sum(fast, x[:1].contiguous())
    assert int(wrong) == 0


def main() -> None:
    """All of it."""
    logging.basicConfig(level=logging.INFO)
    rank, size, port = (int(word) for word in sys.argv[1:])
    comm, fast = opened(rank, size, port)
    sums(fast)
    same_bits(comm, fast)
    norms(comm, fast)
    in_graphs(fast)
    assert comm.close(20.0) == ""
    print("right", flush=True)


if __name__ == "__main__":
    main()
