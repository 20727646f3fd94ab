"""Decode attention in Triton's interpreter, against the reference, over caches poisoned with NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops import provide
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kernels.attend_decode import COUNTERS, attend_decode
from agentinfer.ops.kernels.tiles import AttendTile, attend_tile
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import HeadShape
from agentinfer.ops.rope import RopeSpec, cos_sin


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(shape: HeadShape, starts: list[int], rows: list[int] | None = None, block: int = 4) -> tuple[Inputs, LayerKv]:
    """One token a row over a poisoned pool whose earlier positions hold the same random KV for every caller."""
    columns = max(starts) // block + 2
    layout = kvs.gqa(block, shape.num_kv_heads, shape.head_dim, torch.float32)
    kv = kvs.allocate([layout], columns * len(starts), 9, columns, torch.device("cpu"), math.nan)
    blocks = [[1 + row + len(starts) * i for i in range(columns)] for row in range(len(starts))]
    x, kv = by_hand(kv, [[1]] * len(starts), starts, blocks, rows)
    for row, start in enumerate(starts):
        for at in range(start):
            place = blocks[row][at // block], at % block
            kv.layers[0].k[place] = rand(shape.num_kv_heads, shape.head_dim, seed=100 * row + at)
            kv.layers[0].v[place] = rand(shape.num_kv_heads, shape.head_dim, seed=7000 + 100 * row + at)
    kv.table[0] = 10**6  # what no row owns is never looked up
    return x, kv.layers[0]


def both(
    shape: HeadShape, starts: list[int], tile: AttendTile | None, *, normed: bool, window: int | None, rows: list[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output of the kernel and of the reference; asserts that both leave the same cache."""
    qkv = rand(len(starts), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    norms = [1 + 0.2 * rand(shape.head_dim, seed=s) if normed else None for s in (1, 2)]
    angles = cos_sin(RopeSpec(1e4, shape.head_dim), 64)
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    x, kv = step(shape, starts, rows)
    before = qkv.clone()
    got = attend_decode(
        qkv, kv.k, kv.v, x.table, x.rows, x.context, x.slots, shape.num_heads, angles, *norms, 1e-6, 0.35, window,
        counters, tile=tile,
    )  # fmt: skip
    assert torch.equal(qkv, before)
    assert not counters.any()
    x, plain = step(shape, starts, rows)
    want = provide.attend_reference(qkv, plain, x, shape, angles, *norms, 1e-6, 0.35, window)
    for mine, theirs in ((kv.k, plain.k), (kv.v, plain.v)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    return got, want


@pytest.mark.parametrize(
    "tile",
    [
        AttendTile(1, 16, 1, 1), AttendTile(2, 16, 1, 2), AttendTile(4, 16, 1, 2), AttendTile(4, 16, 1, 2, least=32),
        AttendTile(1, 16, 1, 3, ahead=True), AttendTile(1, 16, 1, 3, early=False, ahead=True),
        AttendTile(4, 16, 1, 3, early=False), AttendTile(4, 16, 1, 3, ahead=True, whole=2),
        AttendTile(4, 16, 1, 2, whole=9, registers=168),
    ],
)  # fmt: skip
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_it_is_the_reference(tile: AttendTile, normed: bool, window: int | None) -> None:
    """Rows of any length, from none to many keys before, equal the reference for any split, norm and window."""
    got, want = both(
        HeadShape(6, 2, 64), [0, 37, 5, 16], tile, normed=normed, window=window, rows=[4, 2, 9, 1]
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [HeadShape(9, 3, 64), HeadShape(7, 1, 64), HeadShape(4, 4, 128), HeadShape(16, 1, 64)]
)
@pytest.mark.parametrize("splits", [1, 8])
def test_any_number_of_heads(shape: HeadShape, splits: int) -> None:
    """Groups of one, three, seven and sixteen query heads a KV head equal the reference, split or not."""
    got, want = both(shape, [3, 33], AttendTile(splits, 16, 1, 1), normed=True, window=None, rows=[1, 2])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_heads_may_lie_apart(ahead: bool) -> None:
    """A cache whose heads come before its tokens gives bit for bit what the usual one gives, and is written alike."""
    shape, tile = HeadShape(4, 2, 64), AttendTile(2, 16, 1, 3, ahead=ahead)
    qkv, angles = rand(2, 8 * 64), cos_sin(RopeSpec(1e4, 64), 64)
    results = []
    for apart in (False, True):
        x, kv = step(shape, [9, 40])
        planes = [plane.transpose(1, 2).contiguous().transpose(1, 2) if apart else plane for plane in (kv.k, kv.v)]
        out = attend_decode(
            qkv, *planes, x.table, x.rows, x.context, x.slots, 4, angles, None, None, 1e-6, 0.35, None,
            torch.zeros(COUNTERS, dtype=torch.int32), tile=tile,
        )  # fmt: skip
        results.append((out, *planes))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=0, equal_nan=True)


def test_padding_changes_nobody() -> None:
    """A row of padding writes to the sink, reads no cache, gives finite numbers, and other rows stay bit for bit."""
    shape, tile = HeadShape(4, 2, 64), AttendTile(2, 16, 1, 1)
    qkv, angles = rand(3, 8 * 64), cos_sin(RopeSpec(1e4, 64), 64)
    results = []
    for count in (2, 3):
        x, kv = step(shape, [9, 20])
        pad = torch.zeros(count - 2, dtype=torch.int64)
        results.append(
            attend_decode(
                qkv[:count], kv.k, kv.v, x.table, torch.cat((x.rows, pad)), torch.cat((x.context, pad.int() + 1)),
                torch.cat((x.slots, pad)), 4, angles, None, None, 1e-6, 0.35, None,
                torch.zeros(COUNTERS, dtype=torch.int32), tile=tile,
            )
        )  # fmt: skip
    assert torch.equal(results[0], results[1][:2])
    assert results[1].isfinite().all()


def test_no_rows_give_no_rows() -> None:
    """An empty batch gives an empty output."""
    kv = torch.zeros(2, 4, 2, 64)
    none = torch.zeros(0, dtype=torch.int64)
    out = attend_decode(
        rand(0, 8 * 64), kv, kv, none.view(0, 1), none, none, none, 4, rand(4, 64), None, None, 1e-6, 1.0, None, none
    )  # fmt: skip
    assert out.shape == (0, 256)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 24, 32, 56, 57, 64, 256])
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 32])
def test_splits_fit_the_counters(rows: int, heads: int) -> None:
    """Keys are split only where every row and KV head has a counter."""
    tile = attend_tile(rows, heads)
    assert tile.splits == 1 or rows * heads <= COUNTERS
