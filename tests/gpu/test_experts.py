"""Routing and experts by our kernels on this GPU: against float32 over the same rounded numbers, with and without
programmatic dependent launch, alone and in captured graphs; and whole tiny DeepSeeks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import deepseeks
from agentinfer.models.model import load_model
from agentinfer.ops import experts as ours
from agentinfer.ops import moe, norm
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import Site, chosen, refusal
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Memo, by_hand
from agentinfer.ops.kernels.add_norm import add_norm
from agentinfer.ops.kernels.expert_gemm import ExpertTile, expert_gemm, expert_tile
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.route import choose_experts, router_logits
from agentinfer.ops.kernels.route_one import route_one
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.products import Launch
from agentinfer.ops.provide import LayerShape, Stream, reference
from agentinfer.ops.streams import added
from agentinfer.ops.triton_ops import triton_ops
from models.drive import Driver

CUDA = torch.device("cuda")
LITE = Routing(6, "softmax", normalise=False)
V3 = Routing(8, "sigmoid", normalise=True, scale=2.5, groups=8, kept_groups=4, group_score="top2")
SHAPES = {  # model width, experts, width of one, shared width, routing
    "V2-Lite": (2048, 64, 1408, 2816, LITE),
    "V3 of 8 ranks": (7168, 256, 256, 256, V3),
    "Qwen3-30B": (2048, 128, 768, 0, Routing(8, "softmax", normalise=True)),
    "small": (128, 16, 64, 96, evolve(V3, top_k=4)),
}
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Relative to the norm of a row."""


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    gen = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(shape, generator=gen, device=CUDA, dtype=torch.float32) * scale).to(dtype)


class Layer:
    """The second half of a layer: weights, and what comes in."""

    def __init__(self, name: str, count: int, dtype: torch.dtype) -> None:
        d, e, f, g, self.routing = SHAPES[name]
        self.gate_up, self.down = (
            torch.stack([rand(*shape, seed=seed + 10 * i, dtype=dtype, scale=shape[1] ** -0.5) for i in range(e)])
            for seed, shape in ((1, (2 * f, d)), (2, (d, f)))
        )
        self.shared = (
            rand(2 * g, d, seed=3, dtype=dtype, scale=d**-0.5), rand(d, g, seed=4, dtype=dtype, scale=g**-0.5)
        ) if g else (None, None)  # fmt: skip
        self.router, self.norm = rand(e, d, seed=5, scale=d**-0.5), (1 + rand(d, seed=6, scale=0.2)).to(dtype)
        self.bias = rand(e, seed=7, scale=0.1) if self.routing.scoring == "sigmoid" else None
        self.residual, self.pending = rand(count, d, seed=8), rand(2, count, d, seed=9)

    def run(self, *, pdl: bool, gemm_rows: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(normed, weights, experts, what the residual is in the end)."""
        run = Launch(
            pdl=pdl, gemm_rows=gemm_rows, narrow_rows=gemm_rows, counters=torch.zeros(1, dtype=torch.int32, device=CUDA)
        )
        stream = Stream(self.residual.clone(), self.pending)
        *work, stream = ours.norm_route(run, stream, self.norm, self.router, self.bias, self.routing, 1e-6)
        stream = ours.experts_add(run, *work, self.gate_up, self.down, *self.shared, stream, alone().tp)
        return *work, added(stream, self.norm.dtype)


def off(got: Tensor, want: Tensor) -> float:
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max())


# Float32 is for tests, of few rows.
@pytest.mark.parametrize(
    ("count", "dtype"), [(n, d) for n in (1, 2, 17, 64, 200, 700) for d in LIMITS if n < 64 or d.itemsize < 4]
)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer(name: str, count: int, dtype: torch.dtype) -> None:
    """Any number of positions gets what float32 gives for the same normed rows and routes, PDL changes no bit."""
    layer = Layer(name, count, dtype)
    normed, weights, chosen, got = layer.run(pdl=False)
    assert all(torch.equal(a, b) for a, b in zip(layer.run(pdl=True), (normed, weights, chosen, got), strict=True))
    total = layer.residual + layer.pending[0] + layer.pending[1]
    assert off(normed, norm.rms_norm(total, layer.norm.float(), 1e-6)) < LIMITS[dtype]
    routes = moe.route(moe.router_logits(normed, layer.router), layer.bias, layer.routing)
    for a, b in zip((weights, chosen), routes, strict=True):
        torch.testing.assert_close(a.sort(-1).values, b.sort(-1).values, rtol=1e-4, atol=1e-5)
    wide = moe.experts(normed.float(), weights, chosen, OneByOne(layer.gate_up), OneByOne(layer.down))
    if layer.shared[0] is not None:
        gate_up, down = (w.float() for w in layer.shared)
        wide += norm.silu_and_mul(normed.float() @ gate_up.T) @ down.T
    assert off(got - total, wide) < 2 * LIMITS[dtype]


class OneByOne:
    """A weight whose experts become float32 one at a time: all of them do not fit."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, i: int) -> Tensor:
        return self.weight[i].float()


@pytest.mark.parametrize("name", ["V2-Lite", "small"])
@pytest.mark.parametrize("count", [1, 40, 256])
def test_a_graph_follows_the_routes(name: str, count: int) -> None:
    """A captured layer, replayed over other inputs, gives bit for bit what it gives eagerly for those, 50 times."""
    layer = Layer(name, count, torch.bfloat16)
    layer.run(pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(pdl=True)[-1]
    for seed in range(3):
        layer.residual.copy_(rand(*layer.residual.shape, seed=50 + seed))
        want = layer.run(pdl=False)[-1]
        worst = torch.zeros((), device=CUDA)
        for _ in range(50):
            out.fill_(math.nan)
            graph.replay()
            worst = torch.maximum(worst, (out != want).sum())
        assert worst.item() == 0


def test_all_to_one_expert() -> None:
    """When every position wants the same experts nothing is dropped, and experts that nobody wants are not read."""
    layer = Layer("small", 300, torch.bfloat16)
    layer.gate_up[4:] = math.nan
    layer.down[4:] = math.nan
    x = rand(300, 128, dtype=torch.bfloat16)
    weights, chosen = rand(300, 4, seed=1).abs(), torch.arange(4, device=CUDA).repeat(300, 1)
    want = moe.experts(x.float(), weights, chosen, layer.gate_up.float(), layer.down.float())
    for rows in (16, 32, 64, 128):
        tile = ExpertTile(rows, 64, 64, 3, 4)
        out = torch.full((4, 300, 128), math.nan, device=CUDA)
        expert_gemm(x, weights, expert_rows(chosen, 16, rows), layer.gate_up, layer.down, out, tile=tile)
        assert off(out.sum(0), want) < 1e-2
    assert expert_tile(1200, 16, 2).rows == 128


@pytest.mark.parametrize("count", [1, 5, 256])
@pytest.mark.parametrize(("experts", "r"), [(64, LITE), (256, V3), (160, evolve(V3, top_k=6, group_score="max"))])
def test_routes(count: int, experts: int, r: Routing) -> None:
    """Logits are float32's and do not depend on the number of rows; experts are in range whatever they are."""
    x, router = rand(count, 2048, dtype=torch.bfloat16), rand(experts, 2048, seed=1, scale=0.02)
    logits = router_logits(x, router, pdl=True)
    torch.testing.assert_close(logits, (x.double() @ router.double().T).float(), rtol=1e-5, atol=1e-5)
    for value in (math.nan, math.inf, -math.inf):
        _, chosen = choose_experts(torch.full_like(logits, value), None, r)
        assert ((chosen >= 0) & (chosen < experts)).all()
        assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("name", SHAPES)
def test_one_position_is_routed_in_one_kernel(name: str) -> None:
    """Norm, logits and choice are those of three kernels, PDL and 200 replays of a graph change no bit."""
    layer = Layer(name, 1, torch.bfloat16)
    counters = torch.zeros(1, dtype=torch.int32, device=CUDA)
    rest = (layer.norm, layer.router, layer.bias, layer.routing, 1e-6, counters)
    normed, weights, chosen = route_one(layer.residual, *rest)
    want = add_norm(layer.residual, None, layer.norm, 1e-6, torch.bfloat16)
    torch.testing.assert_close(normed, want, rtol=1e-2, atol=1e-3)
    routes = choose_experts(router_logits(normed, layer.router), layer.bias, layer.routing)
    torch.testing.assert_close(weights, routes[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(chosen.sort().values, routes[1].sort().values)
    again = route_one(normed, None, *rest[1:])
    assert all(torch.equal(a, b) for a, b in zip(again, (normed, weights, chosen), strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [route_one(layer.residual, *rest, pdl=True) for _ in range(4)]
    worst = torch.zeros((), device=CUDA)
    for _ in range(50):
        graph.replay()
        for found in out:
            for a, b in zip(found, (normed, weights, chosen), strict=True):
                worst = torch.maximum(worst, (a != b).sum())
                a.zero_()
    assert worst.item() == 0
    assert counters.item() == 0


@pytest.mark.filterwarnings("ignore")  # of what vllm imports
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 64, 700])
@pytest.mark.parametrize("name", ["V2-Lite", "Qwen3-30B"])
def test_a_layer_by_vllm(name: str, count: int, dtype: torch.dtype) -> None:
    """vLLM's fused experts, with our router and our shared ones, give what ours give; so does a captured graph."""
    _, e, f, _, routing = SHAPES[name]
    site = Site.of(CUDA, dtype, LayerShape(HeadShape(32, 8, 128), None, ExpertShape(e, routing.top_k, f)), 16)
    problem = refusal("vllm-moe", site)
    if problem:
        pytest.skip(problem)
    ops, layer = chosen("vllm-moe", site)[0], Layer(name, count, dtype)
    normed, weights, experts, want = layer.run(pdl=False)
    before = layer.residual + layer.pending.sum(0)

    def run() -> Tensor:
        stream = Stream(before.clone(), None)
        work = (normed, weights, experts, layer.gate_up, layer.down, *layer.shared)
        after = ops.experts_add(*work, stream, alone().tp)
        assert after.pending_TD is not None
        return after.residual_TD + after.pending_TD.sum(0, dtype=torch.float32)

    got = run()
    assert off(got - before, want - before) < 3 * LIMITS[dtype]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, got)


SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("config", [deepseeks.V2, deepseeks.V3], ids=["v2", "v3"])
def test_tiny_models(config: dict[str, Any], tmp_path: Path) -> None:
    """In float32 a prompt, chunks and single queries give the reference's logits; a captured decode step gives bit for
    bit what it gives eagerly.
    """
    folder = deepseeks.write(tmp_path, {**config, **SIZES})
    ranks = alone(CUDA)
    plain, mine = (
        Driver(*load_model(folder, None, ranks), ranks, 16, ops) for ops in (reference(), triton_ops(CUDA))
    )  # fmt: skip
    for work in ({1: range(70), 2: range(5)}, {1: [3], 2: range(9), 3: range(8, 40)}, {2: [4]}, {1: [1], 2: [2]}):
        want, got = plain.step(work), mine.step(work)
        for row in work:
            torch.testing.assert_close(got[row], want[row], rtol=1e-3, atol=1e-3)
    rows = [1, 2, 3]
    x, mine.kv = by_hand(
        mine.kv, [[7]] * 3, [mine.computed[r] for r in rows], [mine.blocks[r] for r in rows], rows, every=True
    )

    def run() -> Tensor:
        logits, mine.kv = mine.model.forward(
            mine.model.config, mine.weights, mine.ops, mine.ranks, mine.kv, evolve(x, memo=Memo(), host=None)
        )
        return logits

    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for _ in range(20):
        logits.fill_(math.nan)
        graph.replay()
        assert torch.equal(logits, want)
