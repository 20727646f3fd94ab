"""Layers of DeepSeek-V3's real width with weights of 8 bits on this GPU, held so and multiplied out, a layer at a time,
against float32 over the numbers that the weights stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import sources
from agentinfer.models import deepseek, mlp
from agentinfer.models.fp8 import NATIVE
from agentinfer.models.model import Model, dummy_model, kv_layout
from agentinfer.ops import moe, norm, provide
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import LayerKv, allocate
from agentinfer.ops.linear import linear
from agentinfer.ops.provide import Ops, Stream
from agentinfer.ops.scaled import Scaled, dequantized
from agentinfer.ops.triton_ops import triton_ops

CUDA = torch.device("cuda")
SIZES = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "vocab_size": 1024}
"""One dense layer and two with experts."""
STREAM = 24.0
"""Deviation of what comes in. By their widths these layers add numbers of 3 to 6, at most a quarter of it."""
STEPS = {"1 row": [1], "16 rows": [1] * 16, "a chunk": [40], "chunks": [1400, 300]}
"""Queries of each row. The last one has rows enough for every product to round its activations."""
OUTPUT = 2e-2
"""Most that a layer's output is off, relative to the norm of a position's."""
ADDED = {"few": 1.2e-2, "many": 7e-2}
"""The same of what the layer adds, by positions of a step: 3 bits of mantissa are left of rounded activations."""


def native(folder: Path) -> tuple[Model, Any]:
    """The layers with weights of 8 bits, about 24 GB."""
    raw = json.loads((sources.ROOT / "configs" / "DeepSeek-V3" / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**raw, **SIZES}))
    return dummy_model(folder, torch.bfloat16, alone(CUDA), 2048, fp8=NATIVE)


def multiplied_out(x: Any) -> Any:
    """A layer's weights in bfloat16, as "dequantize" holds them."""
    if isinstance(x, Scaled):
        if x.stored.dim() == 2:
            return dequantized(x.stored, x.scales).to(torch.bfloat16)
        out = torch.empty(x.stored.shape, dtype=torch.bfloat16, device=x.stored.device)
        for i in range(len(x)):
            out[i].copy_(dequantized(x.stored[i], x.scales[i]))
        return out
    return _each(x, multiplied_out)


def in_float32(x: Any) -> Any:
    """A layer's weights in float32, those of 8 bits as they are: the reference multiplies them out in float32."""
    return x.float() if isinstance(x, Tensor) else x if isinstance(x, Scaled) else _each(x, in_float32)


def _each(x: Any, f: Any) -> Any:
    if x is None or isinstance(x, Tensor):
        return x
    return attrs.evolve(x, **{field.name: f(getattr(x, field.name)) for field in attrs.fields(type(x))})


def step(model: Model, counts: list[int], dtype: torch.dtype) -> tuple[Inputs, LayerKv]:
    """A first step of rows with so many positions each, and KV of nothing yet."""
    layout = kv_layout(model, 1, 16, dtype)[:1]
    columns = -(-max(counts) // 16)
    kv = allocate(layout, len(counts) * columns, len(counts), columns, CUDA)
    tables = [list(range(1 + i * columns, 1 + (i + 1) * columns)) for i in range(len(counts))]
    x, kv = by_hand(kv, [[0] * n for n in counts], [0] * len(counts), tables, list(range(1, len(counts) + 1)))
    return x, kv.consume("a layer").layers[0]


def shared_of(model: Model, ops: Ops, table: Tensor) -> deepseek.Shared:
    c: Any = model.config
    shape, routing = deepseek.local_shape(c, 1), mlp.local_routing(c.experts, alone(CUDA))
    return deepseek.Shared(ops, alone(CUDA).tp, shape, routing, c.norm_eps, c.scale, table)


def added(stream: Stream, residual: Tensor) -> Tensor:
    """What a layer has added to the residual."""
    total = stream.residual_TD.float()
    if stream.pending_TD is not None:
        pending = stream.pending_TD.float()
        total = total + (pending.sum(0) if pending.dim() == 3 else pending)
    return total - residual


def ours(
    model: Model, w: Any, table: Tensor, counts: list[int], residual: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """What a layer adds by our kernels, and its routes."""
    ops, routes = triton_ops(CUDA), []

    def norm_route(*args: Any) -> Any:
        found = ops.norm_route(*args)
        routes.append(found[1:3])
        return found

    shared = shared_of(model, attrs.evolve(ops, norm_route=norm_route), table)
    x, kv = step(model, counts, torch.bfloat16)
    stream = deepseek.layer(shared, w, None, kv, x, Stream(residual.clone(), None))
    return added(stream, residual), routes[0] if routes else None


def wanted(
    model: Model, w: Any, table: Tensor, counts: list[int], residual: Tensor,
    routes: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """The same in float32, the experts being those of *routes*: near ties may fall otherwise."""
    ops, x_kv = provide.reference(), step(model, counts, torch.float32)
    if routes is None:
        shared = shared_of(model, ops, table)
        return added(deepseek.layer(shared, w, None, x_kv[1], x_kv[0], Stream(residual, None)), residual)

    def norm_route(stream: Stream, norm_D: Tensor, *rest: Any) -> Any:
        assert stream.pending_TD is not None
        total = stream.residual_TD + stream.pending_TD
        return norm.rms_norm(total, norm_D, rest[-1]), *routes, Stream(total, None)

    def experts_add(
        normed: Tensor, weights: Tensor, chosen: Tensor, gate_up: Any, down: Any, more: Any, last: Any, stream: Stream,
        _: Any,
    ) -> Stream:  # fmt: skip
        y = moe.experts(normed, weights, chosen, gate_up, down)
        return Stream(stream.residual_TD, y + linear(norm.silu_and_mul(linear(normed, more)), last))

    shared = shared_of(model, attrs.evolve(ops, norm_route=norm_route, experts_add=experts_add), table)
    return added(deepseek.layer(shared, w, None, x_kv[1], x_kv[0], Stream(residual, None)), residual)


def off(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def test_layers(tmp_path: Path) -> None:
    """Held in 8 bits and multiplied out, a layer's output is within 2e-2 of float32, for any number of positions."""
    model, weights = native(tmp_path)  # one test, so that there is one of these however many processes test
    for layer in range(len(weights.layers)):
        check(model, weights, layer)
    del weights
    torch.cuda.empty_cache()


def check(model: Model, weights: Any, layer: int) -> None:
    """Each step of one layer, in both settings."""
    w = weights.layers[layer]
    exact, seen = in_float32(w), {}
    for fp8, held in ((NATIVE, w), ("dequantize", multiplied_out(w))):
        for name, counts in STEPS.items():
            noise = torch.Generator(CUDA).manual_seed(layer)
            residual = STREAM * torch.randn(sum(counts), model.config.hidden_size, generator=noise, device=CUDA)
            got, routes = ours(model, held, weights.cos_sin, counts, residual)
            want = wanted(model, exact, weights.cos_sin, counts, residual, routes)
            seen[fp8, name] = off(residual + got, residual + want), off(got, want)
    print(f"layer {layer}:", {key: tuple(f"{x:.1e}" for x in value) for key, value in seen.items()})
    for (fp8, name), (output, own) in seen.items():
        bound = ADDED["many" if fp8 == NATIVE and sum(STEPS[name]) > 64 else "few"]
        assert output < OUTPUT, (fp8, name, output)
        assert own < bound, (fp8, name, own)
        assert fp8 != NATIVE or name != "chunks" or own > 1e-2, "activations of many rows are rounded"
