"""The Ops record: the reference's own calls against those composed of primitives, and both against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops import norm, provide
from agentinfer.ops.comm import Group, alone
from agentinfer.ops.custom import opaque_ops
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import HeadShape, Ops, Stream
from agentinfer.ops.rope import RopeSpec, cos_sin
from agentinfer.ops.threads import Threads

GROUP = alone().tp
SHAPE = HeadShape(6, 2, 8)
TABLE = cos_sin(RopeSpec(1e4, 8), 64)
MAKERS: list[Callable[[], Ops]] = [
    provide.reference,
    lambda: provide.composed("composed", provide.reference().primitives),
    opaque_ops,
]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(starts: list[int], counts: list[int]) -> tuple[Inputs, LayerKv]:
    """Rows over a poisoned pool whose earlier positions hold the same random KV for every caller."""
    kv = kvs.allocate([kvs.gqa(4, 2, 8, torch.float32)], 20, len(starts), 5, torch.device("cpu"), math.nan)
    blocks = [[1 + row + 4 * i for i in range(5)] for row in range(len(starts))]
    x, kv = by_hand(kv, [[1] * n for n in counts], starts, blocks)
    layer = kv.layers[0]
    for row, start in enumerate(starts):
        for at in range(start):
            block = blocks[row][at // 4]
            layer.k[block, at % 4] = rand(2, 8, seed=100 * row + at)
            layer.v[block, at % 4] = rand(2, 8, seed=7000 + 100 * row + at)
    return x, layer


@pytest.mark.parametrize("maker", MAKERS[1:])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("starts", "counts"), [([0, 0, 0], [5, 1, 3]), ([6, 3, 0], [1, 1, 1]), ([6, 4, 0], [1, 5, 2])])
def test_every_maker_attends_alike(
    maker: Callable[[], Ops], window: int | None, normed: bool, starts: list[int], counts: list[int]
) -> None:
    """attend of the reference and of compositions gives the same output and writes the same KV, for any mix of rows."""
    qkv = rand(sum(counts), 10 * 8)
    weights = (1 + 0.2 * rand(8, seed=1), 1 + 0.2 * rand(8, seed=2)) if normed else (None, None)
    results = []
    for ops in (provide.reference(), maker()):
        x, layer = step(starts, counts)
        before = qkv.clone()
        out = ops.attend(qkv, layer, x, SHAPE, TABLE, *weights, 1e-6, 0.35, window)
        assert torch.equal(qkv, before)
        assert out.shape == (sum(counts), 48)
        results.append((out, layer.k, layer.v))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert results[0][0].isfinite().all()


def test_paged_equals_projected() -> None:
    """A fresh prompt attended through the pages equals causal attention on the projected keys and values."""
    x, layer = step([0], [7])
    qkv = rand(7, 80)
    out = provide.reference().attend(qkv, layer, x, SHAPE, TABLE, None, None, 1e-6, 0.35, None)
    q, k, v = provide.split_heads(qkv, SHAPE)
    q, k = provide.reference().primitives.rotary_embedding(torch.arange(7), q, k, TABLE, False)  # noqa: FBT003 - positional by contract
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))
    want = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=0.35)[0]
    torch.testing.assert_close(out, want.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_one_norm_weight_without_the_other_is_refused(maker: Callable[[], Ops]) -> None:
    """q norm without k norm is an error, never half a norm."""
    x, layer = step([0], [2])
    with pytest.raises(ValueError, match="both or neither"):
        maker().attend(rand(2, 80), layer, x, SHAPE, TABLE, torch.ones(8), None, 1e-6, 0.35, None)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_plain_formula(maker: Callable[[], Ops], bias: bool) -> None:
    """Residual, norms, projections and the sampled head equal the formulas of a pre-norm transformer written out."""
    ops = maker()
    embedding, qkv_w, out_w = rand(11, 16), rand(80, 16, seed=1), rand(16, 48, seed=2)
    gate_up_w, down_w = rand(24, 16, seed=3), rand(16, 12, seed=4)
    n1, n2, n3 = (1 + 0.2 * rand(16, seed=s) for s in (5, 6, 7))
    qkv_b, out_b, gu_b, down_b = (rand(n, seed=8 + i) if bias else None for i, n in enumerate((80, 16, 24, 16)))
    ids, samples, attn = torch.tensor([3, 1, 10]), torch.tensor([0, 2]), rand(3, 48, seed=20)

    stream = ops.embed(ids, embedding, GROUP)
    qkv, stream = ops.norm_qkv(stream, n1, qkv_w, qkv_b, 1e-6)
    stream = ops.out_add(attn, out_w, out_b, stream, GROUP)
    act, stream = ops.norm_gate_up(stream, n2, gate_up_w, gu_b, 1e-6)
    stream = ops.down_add(act, down_w, down_b, stream, GROUP)
    logits = ops.norm_head(stream, samples, n3, embedding, 1e-6, GROUP, 10)

    def plus(x: Tensor, b: Tensor | None) -> Tensor:
        return x if b is None else x + b

    h = embedding[ids]
    torch.testing.assert_close(qkv, plus(norm.rms_norm(h, n1, 1e-6) @ qkv_w.t(), qkv_b))
    h = h + plus(attn @ out_w.t(), out_b)
    gate, up = plus(norm.rms_norm(h, n2, 1e-6) @ gate_up_w.t(), gu_b).chunk(2, -1)
    torch.testing.assert_close(act, gate * torch.sigmoid(gate) * up)
    h = h + plus((gate * torch.sigmoid(gate) * up) @ down_w.t(), down_b)
    want = (norm.rms_norm(h, n3, 1e-6) @ embedding.t())[samples, :10]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert logits.dtype == torch.float32


def test_two_additions_in_a_row_are_both_kept() -> None:
    """out_add on a stream that still has something pending adds to it."""
    ops = provide.reference()
    stream = Stream(rand(2, 4), rand(2, 4, seed=1))
    before = stream.pending_TD.clone()  # pyright: ignore[reportOptionalMemberAccess]
    after = ops.out_add(rand(2, 4, seed=2), torch.eye(4), None, stream, GROUP)
    assert after.pending_TD is not None
    torch.testing.assert_close(after.pending_TD, before + rand(2, 4, seed=2))
    assert stream.pending_TD is not None
    assert torch.equal(stream.pending_TD, before)


def test_the_stream_survives_a_step_without_samples() -> None:
    """norm_head of no position gives logits of no row."""
    stream = Stream(rand(3, 4), rand(3, 4, seed=1))
    logits = provide.reference().norm_head(
        stream, torch.empty(0, dtype=torch.int64), torch.ones(4), rand(7, 4), 1e-6, GROUP, 7
    )
    assert logits.shape == (0, 7)


def test_cut_over_two_ranks_a_layer_gives_the_same() -> None:
    """Row-parallel calls with cut weights and one bias equal the whole ones."""
    w, b, x = rand(4, 8), rand(4, seed=1), rand(3, 8, seed=2)

    def work(group: Group) -> Tensor:
        part = slice(4 * group.rank, 4 * group.rank + 4)
        stream = provide.reference().down_add(
            x[:, part].contiguous(), w[:, part].contiguous(), b, Stream(torch.zeros(3, 4), None), group
        )
        assert stream.pending_TD is not None
        return stream.pending_TD

    for result in Threads.of(2).run(work):
        torch.testing.assert_close(result, x @ w.t() + b)
