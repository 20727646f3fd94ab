"""Products with weights of 8 bits on this GPU: against float32, with and without programmatic dependent launch, alone
and in captured graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentinfer.ops import moe, norm, scaled
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.quantize import quantize
from agentinfer.ops.kernels.scaled_experts import scaled_expert_tile, scaled_experts
from agentinfer.ops.products import Launch, gated, product
from agentinfer.ops.scaled import Scaled

CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def weight(rows: int, columns: int, seed: int = 1) -> Scaled[Tensor]:
    size = rand(-(-rows // 128), -(-columns // 128), seed=seed + 1).exp()
    size = size.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return scaled.quantized(rand(rows, columns, seed=seed) * size / columns**0.5)


def off(got: Tensor, want: Tensor) -> float:
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max())


def launch(*, pdl: bool) -> Launch:
    return Launch(pdl=pdl, gemm_rows=64, narrow_rows=128, counters=torch.zeros(0))


def captured(run: Callable[[], Tensor]) -> bool:
    """Whether *run* gives from a graph, over and over, what it gives without."""
    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(math.nan)
        graph.replay()
        if not torch.equal(out, want):
            return False
    return True


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 300])
def test_rounding(rows: int, dtype: torch.dtype) -> None:
    """Numbers and scales are the reference's bit for bit."""
    x = (rand(rows, 7168) * rand(rows, 7168, seed=1).exp()).to(dtype)
    x[0, :128] = 0
    (got, scales), (want, wanted) = quantize(x, pdl=True), scaled.quantized_rows(x)
    assert torch.equal(scales, wanted.t())
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 17, 40, 64, 65, 500])
@pytest.mark.parametrize(("n", "k", "glu"), [(2112, 7168, False), (1536, 1552, False), (2048, 7168, True)])
def test_products(n: int, k: int, glu: bool, rows: int, dtype: torch.dtype) -> None:
    """Up to 64 rows a product is off as one in half precision, beyond as activations of 8 bits are; launches change no
    bit.
    """
    x, w = rand(rows, k, dtype=dtype), weight(2 * n if glu else n, k)
    call = gated if glu else product
    want = scaled.scaled_linear(x.float(), w)
    want = norm.silu_and_mul(want) if glu else want
    got = call(launch(pdl=True), x, w, None)
    assert off(got, want) < (5e-3 if rows <= 64 else 6e-2)
    assert torch.equal(call(launch(pdl=False), x, w, None), got)
    if rows > 64 and not glu:
        assert off(got, scaled.quantized_linear(x.float(), w)) < 5e-3
    assert captured(lambda: call(launch(pdl=True), x, w, None))


@pytest.mark.parametrize("count", [1, 7, 64, 200])
def test_experts(count: int) -> None:
    """Experts of any number of positions are off as products are, and graphs follow the routes."""
    gate_up, down = ([weight(*shape, seed=5 * i) for i in range(16)] for shape in ((1024, 2048), (2048, 512)))
    w = [
        Scaled(torch.stack([x.stored for x in ws]), torch.stack([x.scales for x in ws])) for ws in (gate_up, down)
    ]  # fmt: skip
    x, weights = rand(count, 2048, dtype=torch.bfloat16), rand(count, 4, seed=2).abs()
    chosen = rand(count, 16, seed=3).topk(4).indices
    tile = scaled_expert_tile(4 * count, 16)

    def run(*, pdl: bool = True) -> Tensor:
        out = torch.empty((4, count, 2048), device=CUDA)
        rows = expert_rows(chosen, 16, tile.rows, pdl=pdl)
        scaled_experts(x, weights, rows, *w, out, pdl=pdl, tile=tile)
        return out

    got = run()
    assert tile.rounded == (count == 200)
    assert off(got.sum(0), moe.experts(x.float(), weights, chosen, *w)) < (7e-2 if tile.rounded else 1e-2)
    assert torch.equal(run(pdl=False), got)
    assert captured(run)
    chosen.copy_(chosen.flip(0))
    assert captured(run)
