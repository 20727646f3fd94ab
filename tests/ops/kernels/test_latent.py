"""Latent attention by our kernels, in Triton's interpreter, against the reference, over caches poisoned with NaN."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import GraphBinding, InvalidSetting
from agentinfer.ops import kv as kvs
from agentinfer.ops import latent
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kernels.attend_latent import LatentTile, absorb, attend_latent, latent_tile
from agentinfer.ops.kv import KvCache
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.provide import reference
from agentinfer.ops.rope import RopeSpec, cos_sin

SHAPE = LatentShape(num_heads=3, nope_dim=32, rope_dim=16, latent_dim=64, value_dim=16)
BLOCK, EPS, SCALE = 4, 1e-6, 0.2
ANGLES = cos_sin(RopeSpec(1e4, 16), 300)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shape: LatentShape) -> tuple[Tensor, Tensor]:
    """(norm, kv_b)."""
    kv_b = 0.2 * rand(shape.num_heads, shape.nope_dim + shape.value_dim, shape.latent_dim, seed=9)
    return 1 + 0.2 * rand(shape.latent_dim, seed=8), kv_b


def step(shape: LatentShape, starts: list[int], counts: list[int], rows: list[int]) -> tuple[Inputs, KvCache]:
    """Rows over a poisoned pool whose earlier positions hold the same random latents for every caller."""
    columns = max(a + n for a, n in zip(starts, counts, strict=True)) // BLOCK + 1
    layout = kvs.mla(BLOCK, shape.latent_dim, shape.rope_dim, torch.float32)
    kv = kvs.allocate([layout], columns * len(starts), 9, columns, torch.device("cpu"), math.nan)
    blocks = [[1 + row + len(starts) * i for i in range(columns)] for row in range(len(starts))]
    x, kv = by_hand(kv, [[1] * n for n in counts], starts, blocks, rows)
    for row, start in enumerate(starts):
        for at in range(start):
            kv.layers[0].k[blocks[row][at // BLOCK], at % BLOCK, 0] = rand(shape.cached_dim, seed=100 * row + at)
    kv.table[0] = 10**6  # what no row owns is never looked up
    return x, kv


def product(shape: LatentShape, count: int) -> tuple[Tensor, Tensor]:
    """Query and latent as one product gives them: views of rows that lie apart."""
    both = rand(count, shape.num_heads * shape.query_dim + shape.cached_dim, seed=3)
    return both[:, : -shape.cached_dim], both[:, -shape.cached_dim :]


def decoded(shape: LatentShape, starts: list[int], tile: LatentTile | None) -> tuple[Tensor, Tensor]:
    """Output of the kernels and of the reference; asserts that both leave the same cache."""
    (norm, kv_b), (q, new) = weights(shape), product(shape, len(starts))
    rows = [9 - i % 9 for i in range(len(starts))]
    x, kv = step(shape, starts, [1] * len(starts), rows)
    got = attend_latent(
        q, new, kv.layers[0].k, x.table, x.rows, x.context, x.slots, shape.nope_dim, ANGLES, norm, kv_b, EPS, SCALE,
        interleaved=shape.interleaved, tile=tile,
    )  # fmt: skip
    x, plain = step(shape, starts, [1] * len(starts), rows)
    want = reference().attend_latent(q, new, plain.layers[0], x, shape, ANGLES, norm, kv_b, SCALE, EPS)
    torch.testing.assert_close(kv.layers[0].k, plain.layers[0].k, rtol=1e-5, atol=1e-5, equal_nan=True)
    return got, want


@pytest.mark.parametrize(
    "tile",
    [
        LatentTile(1, 16, 4, 1, 1), LatentTile(2, 16, 4, 1, 2), LatentTile(8, 16, 4, 1, 2),
        LatentTile(4, 16, 2, 1, 2, least=32), None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_is_the_reference(tile: LatentTile | None, interleaved: bool) -> None:
    """Rows of any length, from none to many keys before, equal the reference for any split and rope style."""
    got, want = decoded(evolve(SHAPE, interleaved=interleaved), [0, 70, 5, 16], tile)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_many_rows(splits: int) -> None:
    """So many rows that splits are put together 16 rows at once, the last tile partly filled, equal the reference."""
    starts = [0, 50, 5, 16, 33, 1, 17, 3, 40]
    got, want = decoded(SHAPE, starts, LatentTile(splits, 16, 4, 1, 1))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 16, 20])
def test_any_number_of_heads(heads: int) -> None:
    """One head, as many as a tile has, and more equal the reference."""
    got, want = decoded(evolve(SHAPE, num_heads=heads), [3, 33], LatentTile(2, 16, 16, 1, 1))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_padding_changes_nobody() -> None:
    """A row of padding writes to the sink, reads no cache, gives finite numbers, and other rows stay bit for bit."""
    (norm, kv_b), (q, new) = weights(SHAPE), product(SHAPE, 3)
    results = []
    for count in (2, 3):
        x, kv = step(SHAPE, [9, 20], [1, 1], [1, 2])
        pad = torch.zeros(count - 2, dtype=torch.int64)
        results.append(
            attend_latent(
                q[:count], new[:count], kv.layers[0].k, x.table, torch.cat((x.rows, pad)),
                torch.cat((x.context, pad.int() + 1)), torch.cat((x.slots, pad)), SHAPE.nope_dim, ANGLES, norm, kv_b,
                EPS, SCALE, interleaved=True, tile=LatentTile(2, 16, 4, 1, 1),
            )
        )  # fmt: skip
    assert torch.equal(results[0], results[1][:2])
    assert results[1].isfinite().all()


def test_no_rows_give_no_rows() -> None:
    """An empty batch gives an empty output."""
    norm, kv_b = weights(SHAPE)
    none = torch.zeros(0, dtype=torch.int64)
    out = attend_latent(
        *product(SHAPE, 0), torch.zeros(2, 4, 1, 80), none.view(0, 1), none, none, none, 32, ANGLES, norm, kv_b, EPS,
        SCALE, interleaved=True,
    )  # fmt: skip
    assert out.shape == (0, 48)


@pytest.mark.parametrize("count", [1, 17, 70])
def test_absorb(count: int) -> None:
    """Queries for latents are each head's own product."""
    _, kv_b = weights(SHAPE)
    q, _ = product(SHAPE, count)
    want = torch.einsum("tnu,nul->tnl", q.view(count, 3, 48)[..., :32], kv_b[:, :32])
    torch.testing.assert_close(absorb(q, kv_b, 32), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [2, 16, 32, 128])
def test_tiles(rows: int, heads: int) -> None:
    """Tiles are powers of two, and splits that are put together 16 rows at once are few."""
    t = latent_tile(rows, heads, 2)
    assert all(n & (n - 1) == 0 for n in (t.splits, t.keys, t.heads))
    assert t.splits <= (64 if rows <= 8 else 8)


MIXES = [([0], [70]), ([6, 3, 0], [1, 1, 1]), ([6, 30, 0, 9, 2], [1, 14, 2, 1, 66]), ([3, 0], [2, 3])]


@pytest.mark.parametrize(("starts", "counts"), MIXES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_any_mix_of_rows(starts: list[int], counts: list[int], interleaved: bool) -> None:
    """Prompts, chunks behind cached keys and single queries, in groups of few keys, equal the reference and leave the
    same cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "MOST_KEYS", 50)
        shape = evolve(SHAPE, interleaved=interleaved)
        (norm, kv_b), (q, new) = weights(shape), product(shape, sum(counts))
        rows = [9 - i for i in range(len(starts))]
        results = []
        for op in (latent.attend, reference().attend_latent):
            x, kv = step(shape, starts, counts, rows)
            out = op(q, new, kv.layers[0], x, shape, ANGLES, norm, kv_b, SCALE, EPS)
            results.append((out, kv.layers[0].k))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_padding_in_an_eager_step_gives_zeros() -> None:
    """A row of the sink beside a chunk has an output of zeros."""
    (norm, kv_b), (q, new) = weights(SHAPE), product(SHAPE, 4)
    x, kv = step(SHAPE, [3, 0], [3, 1], [1, 2])
    padded = evolve(x, host=evolve(x.host, rows=(1, 0)), rows=torch.tensor([1, 0]))
    out = latent.attend(q, new, kv.layers[0], padded, SHAPE, ANGLES, norm, kv_b, SCALE, EPS)
    assert out[:3].isfinite().all()
    assert torch.equal(out[3], torch.zeros(48))


def test_what_is_not_supported_is_refused() -> None:
    """Heads that the kernels have no program for, another dtype than the cache's, a cache of keys and values, and a
    chunk in a captured graph are refused by name.
    """
    (norm, kv_b), (q, new) = weights(SHAPE), product(SHAPE, 4)
    x, kv = step(SHAPE, [3], [4], [1])
    rest = (ANGLES, norm, kv_b, SCALE, EPS)
    odd = evolve(SHAPE, nope_dim=24)
    with pytest.raises(InvalidSetting, match="triton: qk_nope_head_dim 24 is no power of two"):
        latent.attend(q, new, kv.layers[0], x, odd, *rest)
    with pytest.raises(InvalidSetting, match="float16 over a latent cache"):
        latent.attend(q.half(), new.half(), kv.layers[0], x, SHAPE, *rest)
    with pytest.raises(GraphBinding):
        latent.attend(q, new, kv.layers[0], evolve(x, host=None), SHAPE, *rest)
    other = kvs.allocate([kvs.gqa(BLOCK, 1, 80, torch.float32)], 2, 1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="caches keys and values"):
        latent.attend(q, new, other.layers[0], x, SHAPE, *rest)
