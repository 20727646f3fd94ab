"""Experts and whole models with weights of 8 bits in Triton's interpreter, against the torch reference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseeks
from agentinfer.models.fp8 import NATIVE
from agentinfer.models.model import held, random_model, read_config
from agentinfer.ops import experts as ours
from agentinfer.ops import moe, norm, provide, scaled
from agentinfer.ops.comm import alone
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.scaled_experts import ScaledExpertTile, scaled_expert_tile, scaled_experts
from agentinfer.ops.kernels.tiles import GemvTile
from agentinfer.ops.linear import linear
from agentinfer.ops.products import Launch
from agentinfer.ops.provide import Stream
from agentinfer.ops.scaled import Scaled
from agentinfer.ops.triton_ops import triton_ops
from ops.kernels.test_deepseek_ops import Run
from ops.kernels.test_scaled_gemm import rand, weight

RUN = Launch(pdl=False, gemm_rows=64, narrow_rows=64, counters=torch.zeros(0))


def stack(count: int, rows: int, columns: int) -> Scaled[Tensor]:
    made = [weight(rows, columns, seed=10 * i) for i in range(count)]
    return Scaled(torch.stack([w.stored for w in made]), torch.stack([w.scales for w in made]))


def routes(count: int, chosen: int, experts: int) -> tuple[Tensor, Tensor]:
    return rand(count, chosen, seed=3).abs(), rand(count, experts, seed=4).topk(chosen).indices


@pytest.mark.parametrize(("n", "k"), [(200, 304), (128, 130)])
@pytest.mark.parametrize("gated", [False, True])
def test_one_row(n: int, k: int, gated: bool) -> None:
    """One row times a weight of 8 bits, with norm, bias, gate and residual, is the reference's."""
    n = 128 if gated else n
    x, w, b, scale = rand(1, k), weight(2 * n if gated else n, k), rand(2 * n if gated else n, seed=5), rand(k, seed=6)
    want = linear(norm.rms_norm(x, scale, 1e-5), w, b)
    want = rand(1, n, seed=7) + (norm.silu_and_mul(want) if gated else want)
    got = gemv(
        x, w, torch.float32, norm_K=scale, eps=1e-5, bias=b, gated=gated, add_to=rand(1, n, seed=7),
        tile=GemvTile(8, 64, 1),
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if gated:
        with pytest.raises(ValueError, match="gate and up of 100 rows"):
            gemv(x, weight(200, k), torch.float32, gated=True)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_experts(count: int, rounded: bool) -> None:
    """Whatever the routes, each part is a position's weighted expert with activations as they are, or rounded twice."""
    gate_up, down = stack(3, 256, 144), stack(3, 256, 128)
    down = Scaled(down.stored[:, :144].contiguous(), down.scales)  # ragged
    x, (weights, ids) = rand(count, 144), routes(count, 2, 3)
    out = torch.full((2, count, 144), torch.nan)
    tile = ScaledExpertTile(16, 64, 2, 1, rounded=rounded)
    scaled_experts(x, weights, expert_rows(ids, 3, 16), gate_up, down, out, tile=tile)
    product = scaled.quantized_linear if rounded else scaled.scaled_linear
    for t in range(count):
        for k in range(2):
            act = norm.silu_and_mul(product(x[t : t + 1], gate_up[int(ids[t, k])]))
            want = product(act, down[int(ids[t, k])])[0] * weights[t, k]
            # what lies between two numbers of 8 bits may be rounded the other way
            torch.testing.assert_close(out[k, t], want, rtol=1e-4, atol=1e-4 if not rounded else 2e-2)
    if not rounded:
        torch.testing.assert_close(out.sum(0), moe.experts(x, weights, ids, gate_up, down), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 70])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_a_layer(count: int, shared: bool, absent: bool) -> None:
    """Experts and shared ones onto a residual are the reference's; an expert of another rank adds nothing."""
    gate_up, down, more = stack(4, 256, 128), stack(4, 128, 128), (weight(256, 128, 90), weight(128, 128, 95))
    x, (weights, ids), residual = rand(count, 128), routes(count, 2, 4), rand(count, 128, seed=8)
    if absent:
        ids[:, 0] = -1
    stream = Stream(residual.clone(), 0.5 * residual[None])
    both = more if shared else (None, None)
    call = partial(ours.experts_add, RUN)
    if absent:
        parts = ours._many(RUN, x, weights, ids, gate_up, down, *both, absent=True)
        got = stream.residual_TD * 1.5 + parts.sum(0, dtype=torch.float32)
    else:
        stream = call(x, weights, ids, gate_up, down, *both, stream, alone().tp)
        assert stream.pending_TD is not None
        got = stream.residual_TD + stream.pending_TD.sum(0, dtype=torch.float32)
    want = provide.reference().experts_add(
        x, weights, ids, gate_up, down, *both, Stream(residual, 0.5 * residual), alone().tp
    )  # fmt: skip
    assert want.pending_TD is not None
    close = 1e-4 if count <= 64 or not shared else 0.1  # shared experts of many rows are rounded
    torch.testing.assert_close(got, want.residual_TD + want.pending_TD, rtol=close, atol=close)


@pytest.mark.parametrize("pairs", [8, 512, 4096, 10000, 65536])
def test_tiles(pairs: int) -> None:
    """Tiles are powers of two that fit a multiprocessor, and blocks of scales; only many rows an expert are rounded."""
    t = scaled_expert_tile(pairs, 256)
    assert 128 % t.n == 0
    assert t.rows in (16, 32, 64)
    assert t.stages * 128 * (2 * t.n + t.rows * (1 if t.rounded else 2)) <= 220 << 10
    assert t.rounded == (pairs > 48 * 256)


SIZES: Mapping[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "q_lora_rank": 128, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
STEPS = ({0: range(7), 1: range(20, 21)}, {1: [5]}, {0: [1], 1: [2]})


def test_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a tiny DeepSeek-V3 held in 8 bits gives the reference's logits, in chunks, one row and several."""
    from agentinfer.ops.kernels import gemv as module

    monkeypatch.setattr(module, "gemv_tile", lambda n, k, gated: GemvTile(32, 64, 1))
    deepseeks.tensors_of({**deepseeks.V3, **SIZES}, tmp_path)
    model, weights = random_model(held(read_config(tmp_path), NATIVE), torch.float32, alone())
    plain, mine = (Run(ops, model, weights) for ops in (provide.reference(), triton_ops(torch.device("cpu"))))
    for work in STEPS:
        torch.testing.assert_close(mine.step(work), plain.step(work), rtol=1e-3, atol=1e-3)
