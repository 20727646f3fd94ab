"""The sum over ranks by writing into each other's memory, in Triton's interpreter: all send, then all add."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentinfer.ops.kernels import all_reduce as kernel
from agentinfer.ops.kernels.add_norm import add_norm
from agentinfer.ops.kernels.all_reduce import all_reduce, all_reduce_norm, rows_fit
from agentinfer.ops.norm import rms_norm
from agentinfer.ops.provide import Stream
from agentinfer.ops.streams import norm


class Peers:
    """Memory of several ranks in one process, full of poison where no flags are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers = [torch.full((kernel.buffer_bytes(size),), 0x7F, dtype=torch.uint8) for _ in range(size)]
        for buffer in self.buffers:
            for i in range(len(kernel.RANGES)):
                at = kernel.buffer_bytes(size, i)
                buffer[at : at + 4 * kernel.PIECES * size] = 0
        self.pointers = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.counters = [torch.zeros(len(kernel.RANGES), kernel.PIECES, dtype=torch.int32) for _ in range(size)]

    def sums(self, parts: list[Tensor]) -> list[Tensor]:
        """One call of all ranks."""
        for rank, x in enumerate(parts):
            all_reduce(x, self.pointers, self.counters[rank], rank, add=False)
        return [
            all_reduce(x, self.pointers, self.counters[rank], rank, patience=3, send=False)
            for rank, x in enumerate(parts)
        ]

    def norms(
        self, parts: list[Tensor], residual: Tensor, weight: Tensor, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """One call of all ranks of the sum and the norm in one: of each, the new residual and the norm."""

        def call(rank: int, **halves: bool) -> tuple[Tensor, Tensor]:
            own = residual.clone()
            peers = self.pointers, self.counters[rank], rank
            return own, all_reduce_norm(parts[rank], own, weight, 1e-6, dtype, *peers, patience=3, **halves)

        for rank in range(self.size):
            own, _ = call(rank, add=False)
            assert torch.equal(own, residual)
        return [call(rank, send=False) for rank in range(self.size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [24, 64])
def test_sum_and_norm_in_one(size: int, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn with plain sums of the same range: the bits of rounded parts' sum, then `add_norm`, on all ranks."""
    monkeypatch.setattr(kernel, "RANGES", (64, 256))
    monkeypatch.setattr(kernel, "PIECES", 16)
    peers = Peers(size)
    for call, (split, rows) in enumerate([(1, 1), (3, 5), (2, 16), (1, 2)]):
        draw = torch.Generator().manual_seed(call)
        kind = torch.float32 if split > 1 else dtype
        parts = [torch.randn((split, rows, width), generator=draw).to(kind) for _ in range(size)]
        residual, weight = torch.randn((rows, width), generator=draw), torch.rand(width, generator=draw).to(dtype)
        total = torch.zeros(rows, width)
        for part in parts:
            total += sum(part.float()).to(dtype).float()
        want = residual.clone()
        normed = add_norm(want, total.to(dtype)[None], weight, 1e-6, dtype)
        for residual_of, found in peers.norms(parts, residual, weight, dtype):
            assert torch.equal(residual_of, want)
            assert torch.equal(found, normed)
        large = [torch.full((kernel.PIECES * kernel.RANGES[0] // 4 + 4,), float(r)) for r in range(size)]
        for got in peers.sums(large):
            assert torch.equal(got, torch.full_like(got, sum(range(size))))


def test_rows_that_fit() -> None:
    """One a program, as long as a piece, of whole 16 bytes."""
    assert rows_fit(256, 8192, torch.bfloat16)
    assert not rows_fit(257, 64, torch.bfloat16)
    assert not rows_fit(1, 8200, torch.bfloat16)
    assert not rows_fit(1, 60, torch.bfloat16)
    assert rows_fit(1, 60, torch.float32)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums(size: int, dtype: torch.dtype) -> None:
    """Messages of all sizes, one after the other, sum to the same bits on every rank, and each part was used once."""
    peers = Peers(size)
    for call, numbers in enumerate((8, 1024, 1032, 3000, 8, 5000)):
        parts = [torch.randn(numbers, generator=torch.Generator().manual_seed(10 * call + r)) for r in range(size)]
        parts = [x.to(dtype) for x in parts]
        want = parts[0].float()
        for part in parts[1:]:
            want = want + part.float()
        for got in peers.sums(parts):
            assert torch.equal(got, want.to(dtype))
    assert peers.counters[0][0, :4].tolist() == ([6, 3, 2, 1] if dtype == torch.float16 else [6, 4, 3, 2])


def test_ranges_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large messages in turn: what is sent of one lies nowhere that another has still to add, and a rank may
    be in the large one while another still adds the small one before it.
    """
    monkeypatch.setattr(kernel, "RANGES", (32, 128))
    monkeypatch.setattr(kernel, "PIECES", 4)
    peers = Peers(2)
    for call in range(1, 5):
        for numbers in (8, 32, 36, 128, 4, 100):
            parts = [torch.full((numbers,), float(call + r)) for r in (0, 10)]
            for got in peers.sums(parts):
                assert torch.equal(got, torch.full((numbers,), 2.0 * call + 10))
    assert peers.counters[0].tolist() == [[12, 4, 4, 4], [12, 12, 8, 8]]
    small, large = torch.ones(32), torch.full((128,), 5.0)
    for rank in range(2):
        all_reduce(small, peers.pointers, peers.counters[rank], rank, add=False)
    first = all_reduce(small, peers.pointers, peers.counters[0], 0, send=False, patience=1)
    all_reduce(large, peers.pointers, peers.counters[0], 0, add=False)  # rank 0 has gone on
    late = all_reduce(small, peers.pointers, peers.counters[1], 1, send=False, patience=1)
    assert torch.equal(first, late)
    assert torch.equal(late, torch.full((32,), 2.0))


def test_who_is_a_call_ahead_does_not_disturb() -> None:
    """What a rank sends for the next call lies elsewhere than what another has still to add."""
    peers, x = Peers(2), [torch.full((16,), float(r)) for r in (1, 2, 3)]
    all_reduce(x[0], peers.pointers, peers.counters[0], 0, add=False)
    all_reduce(x[1], peers.pointers, peers.counters[1], 1, add=False)
    first = all_reduce(x[0], peers.pointers, peers.counters[0], 0, send=False, patience=1)
    all_reduce(x[2], peers.pointers, peers.counters[0], 0, add=False)  # rank 0 is in its second call
    late = all_reduce(x[1], peers.pointers, peers.counters[1], 1, send=False, patience=1)
    assert torch.equal(first, torch.full((16,), 3.0))
    assert torch.equal(late, first)


def test_nothing() -> None:
    """An empty message has an empty sum."""
    peers = Peers(2)
    assert all_reduce(torch.empty(0, 4), peers.pointers, peers.counters[0], 0).shape == (0, 4)


def test_a_norm_that_no_kernel_does_with_the_sum_is_done_after_it() -> None:
    """Parts are summed here, rounded, summed over the ranks, and normed."""
    group: Any = SimpleNamespace(sums_and_norms=lambda *_: None, all_reduce_sum=lambda x: 2 * x)
    parts, weight = torch.arange(16.0).view(2, 2, 4) / 7, torch.ones(4)
    found, stream = norm(Stream(torch.ones(2, 4), parts, group), weight, torch.float16, 0.5, pdl=False)
    total = 1 + 2 * parts.sum(0).half().float()
    assert torch.equal(stream.residual_TD, total)
    torch.testing.assert_close(found, rms_norm(total, weight, 0.5).half())
