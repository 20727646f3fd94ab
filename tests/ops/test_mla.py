"""Latent attention: both of its forms against each other and against plain attention; what the cache holds."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops import mla
from agentinfer.ops.attention import index_of
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import KvCache
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.provide import Stream, reference
from agentinfer.ops.rope import RopeSpec, cos_sin

SHAPE = LatentShape(num_heads=3, nope_dim=8, rope_dim=4, latent_dim=16, value_dim=6)
LITE = LatentShape(num_heads=16, nope_dim=128, rope_dim=64, latent_dim=512, value_dim=128)
TABLE = cos_sin(RopeSpec(1e4, 4), 64)
SCALE, BLOCK = 0.35, 4


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KV_B = 0.3 * rand(3, 14, 16, seed=9)
NORM = 1 + 0.2 * rand(16, seed=8)


def step(starts: list[int], counts: list[int], dtype: torch.dtype = torch.float32) -> tuple[Inputs, KvCache]:
    """Rows over a poisoned pool whose earlier positions hold the same random latents for every caller."""
    layout = kvs.mla(BLOCK, SHAPE.latent_dim, SHAPE.rope_dim, dtype)
    kv = kvs.allocate([layout], 20, len(starts), 5, torch.device("cpu"), math.nan)
    blocks = [[1 + row + len(starts) * i for i in range(5)] for row in range(len(starts))]
    x, kv = by_hand(kv, [[1] * n for n in counts], starts, blocks)
    for row, start in enumerate(starts):
        for at in range(start):
            kv.layers[0].k[blocks[row][at // BLOCK], at % BLOCK, 0] = rand(20, seed=100 * row + at)
    return x, kv


ROWS = [([0, 0, 0], [5, 1, 13]), ([6, 3, 0], [1, 1, 1]), ([6, 4, 0], [1, 14, 2]), ([0], [20]), ([3, 0], [2, 3])]


@pytest.mark.parametrize(("starts", "counts"), ROWS, ids=str)
def test_both_forms_are_equal(starts: list[int], counts: list[int]) -> None:
    """Absorbed and materialized attention differ by rounding alone, for any mix of rows; the mix of both is either."""
    x, kv = step(starts, counts)
    layer, total = kv.layers[0], sum(counts)
    mla.write_latent(rand(total, 16, seed=1), rand(total, 4, seed=2), layer, x.slots)
    q, index = rand(total, 3, 12, seed=3), index_of(x, BLOCK, None, torch.float32)
    cache = mla.latents_of(layer)
    one = mla.attend_absorbed(q, cache, index, SHAPE, KV_B, SCALE)
    two = mla.attend_materialized(q, cache, index, SHAPE, KV_B, SCALE)
    assert one.shape == two.shape == (total, 3, 6)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mla.latent_attention(q, layer, x, SHAPE, KV_B, SCALE), one, rtol=1e-5, atol=1e-5)


def test_rule_of_the_forms() -> None:
    """Single queries are absorbed, long chunks materialized from where that is less work; equal widths never are."""
    assert not mla.materialized(LITE, 1)
    assert next(n for n in range(1, 300) if mla.materialized(LITE, n)) == 171
    assert [mla.materialized(SHAPE, n) for n in (12, 13)] == [False, True]
    assert not mla.materialized(evolve(SHAPE, latent_dim=7), 10_000)


def plain(q: Tensor, latent: Tensor, shape: LatentShape, *, interleaved: bool) -> Tensor:
    """One prompt, written down as the equations are: [T, N * O]."""
    spec = torch.outer(torch.arange(len(q), dtype=torch.float32), 1e4 ** (-torch.arange(0, 4, 2) / 4))

    def turn(x: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :2], x[..., 2:])
        cos, sin = spec.cos().view(-1, *[1] * (x.dim() - 2), 2), spec.sin().view(-1, *[1] * (x.dim() - 2), 2)
        parts = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    c = latent[:, :16]
    c = c / (c.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * NORM
    made = torch.einsum("tl,nxl->tnx", c, KV_B)
    heads = q.view(len(q), 3, 12)
    key = torch.cat((made[..., :8], turn(latent[:, 16:])[:, None].expand(-1, 3, -1)), -1)
    query = torch.cat((heads[..., :8], turn(heads[..., 8:])), -1)
    scores = torch.einsum("tnq,jnq->ntj", query, key) * SCALE
    weights = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -math.inf).softmax(-1)
    return torch.einsum("ntj,jno->tno", weights, made[..., shape.nope_dim :]).flatten(1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", [[20], [7, 13], [1] * 20])
def test_attend_latent(sizes: list[int], interleaved: bool) -> None:
    """A prompt, in any pieces, is attended as the equations say: latents normed, rope on its part, in either style."""
    shape, q, latent = evolve(SHAPE, interleaved=interleaved), rand(20, 36, seed=4), rand(20, 20, seed=5)
    _, kv = step([0], [1])
    parts, at = [], 0
    for size in sizes:
        x, kv = by_hand(kv, [[1] * size], [at], [list(range(1, 6))])
        span = slice(at, at + size)
        got = reference().attend_latent(
            q[span], latent[span], kv.layers[0], x, shape, TABLE, NORM, KV_B, SCALE, 1e-6
        )  # fmt: skip
        parts.append(got)
        at += size
    torch.testing.assert_close(torch.cat(parts), plain(q, latent, shape, interleaved=interleaved), rtol=1e-4, atol=1e-5)


def test_cache_holds_normed_latents_and_turned_keys() -> None:
    """A token's slot holds its latent after the norm and its key after rope, and other slots nothing."""
    x, kv = step([2], [1])
    latent = rand(1, 20, seed=6)
    before = kv.layers[0].k.clone()
    ops = reference()
    ops.attend_latent(rand(1, 36), latent, kv.layers[0], x, SHAPE, TABLE, NORM, KV_B, SCALE, 1e-6)
    _, key = ops.primitives.rotary_embedding(x.positions, latent[:, None, 16:], latent[:, None, 16:], TABLE, True)  # noqa: FBT003 - positional by contract
    row = torch.cat((ops.primitives.rms_norm(latent[:, :16], NORM, 1e-6), key[:, 0]), -1)
    before.view(-1, 20)[x.slots] = row
    assert torch.equal(kv.layers[0].k.nan_to_num(7.0), before.nan_to_num(7.0))


def test_padding_gives_zeros_and_reads_nothing() -> None:
    """Rows of the sink are zero, and poisoned slots behind a context have no effect."""
    x, kv = step([3, 0], [1, 1])
    padded = evolve(x, host=evolve(x.host, rows=(1, 0)), rows=torch.tensor([1, 0]))
    mla.write_latent(rand(2, 16), rand(2, 4), kv.layers[0], x.slots)
    out = mla.latent_attention(rand(2, 3, 12), kv.layers[0], padded, SHAPE, KV_B, SCALE)
    assert out[0].isfinite().all()
    assert torch.equal(out[1], torch.zeros(3, 6))


def test_bfloat16_is_rounded_where_it_is_stored() -> None:
    """Over a cache of bfloat16 both forms give what float32 gives over the same rounded latents."""
    x, kv = step([0], [14], torch.bfloat16)
    latent, rope, q = rand(14, 16, seed=1), rand(14, 4, seed=2), rand(14, 3, 12, seed=3).to(torch.bfloat16)
    mla.write_latent(latent, rope, kv.layers[0], x.slots)
    got = mla.latent_attention(q, kv.layers[0], x, SHAPE, KV_B.to(torch.bfloat16), SCALE)
    assert got.dtype == torch.bfloat16
    x, wide = step([0], [14])
    mla.write_latent(latent.to(torch.bfloat16), rope.to(torch.bfloat16), wide.layers[0], x.slots)
    want = mla.latent_attention(q.to(torch.float32), wide.layers[0], x, SHAPE, KV_B.to(torch.bfloat16), SCALE)
    torch.testing.assert_close(got, want.to(torch.bfloat16), rtol=1e-2, atol=1e-2)


def test_real_shapes() -> None:
    """With DeepSeek-V2-Lite's sizes, in bfloat16, both forms give the same to much less than bfloat16 can tell."""
    layout = kvs.mla(16, 512, 64, torch.bfloat16)
    assert kvs.bytes_per_token([layout] * 27) == 31_104
    kv = kvs.allocate([layout], 6, 2, 3, torch.device("cpu"), math.nan)
    x, kv = by_hand(kv, [[1] * 33, [1] * 9], [0, 0], [[2, 5, 1], [4]])
    mla.write_latent(rand(42, 512, seed=1), rand(42, 64, seed=2), kv.layers[0], x.slots)
    q, kv_b = rand(42, 16, 192, seed=3).to(torch.bfloat16), (0.05 * rand(16, 256, 512, seed=4)).to(torch.bfloat16)
    index, cache = index_of(x, 16, None, torch.float32), mla.latents_of(kv.layers[0])
    one = mla.attend_absorbed(q, cache, index, LITE, kv_b, 0.1147213868)
    two = mla.attend_materialized(q, cache, index, LITE, kv_b, 0.1147213868)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_a_cache_of_keys_and_values_is_refused() -> None:
    """Latents are neither written to nor read from a cache of keys and values."""
    kv = kvs.allocate([kvs.gqa(BLOCK, 1, 20, torch.float32)], 2, 1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 0 caches keys and values"):
        mla.write_latent(rand(1, 16), rand(1, 4), kv.layers[0], torch.tensor([4]))


def test_norm_latent() -> None:
    """The query comes at once, or by a latent that is normed with an eps of its own; nothing stays pending."""
    ops, norm = reference(), 1 + 0.1 * rand(10, seed=1)
    stream = Stream(rand(4, 10, seed=2), rand(4, 10, seed=3))
    x = stream.residual_TD + (stream.pending_TD if stream.pending_TD is not None else 0)
    normed = ops.primitives.rms_norm(x, norm, 1e-3)
    down = rand(36 + 20, 10, seed=4)
    q, latent, after = ops.norm_latent(stream, norm, down, None, None, SHAPE, 1e-3, 1e-6)
    torch.testing.assert_close(q, normed @ down[:36].T)
    torch.testing.assert_close(latent, normed @ down[36:].T)
    assert after.pending_TD is None
    assert torch.equal(after.residual_TD, x)
    q_norm, up = 1 + 0.1 * rand(12, seed=5), rand(36, 12, seed=6)
    down = rand(12 + 20, 10, seed=7)
    q, latent, _ = ops.norm_latent(Stream(x, None), norm, down, q_norm, up, SHAPE, 1e-3, 1e-6)
    torch.testing.assert_close(q, ops.primitives.rms_norm(normed @ down[:12].T, q_norm, 1e-6) @ up.T)
    torch.testing.assert_close(latent, normed @ down[12:].T)
    with pytest.raises(ValueError, match="one of two weights is missing"):
        ops.norm_latent(Stream(x, None), norm, down, q_norm, None, SHAPE, 1e-3, 1e-6)
