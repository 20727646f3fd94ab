"""One compiled function for all layers of a model: torch.compile over a layer whose weights are arguments.

The function is compiled twice for each kind of layer (window or none), whatever the batches and prompts are: for one
position, and for any number of them. The positions of a step are a dynamic dimension; everything else that changes from
step to step reaches the attention operator unseen (`Traced`). Nothing falls back to eager: what can not be traced
whole raises, and so does a ninth compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from agentinfer.ops.attention import HeadShape
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import LayerShape, Stream, Traced

Layer = Callable[[Any, Any, int | None, LayerKv, Inputs, Stream], Stream]
"""(what all layers share, weights, window, kv, inputs, stream) -> stream. Writes this step's keys and values to kv."""


def compiled_layer(
    layer: Layer,
    traced: Callable[[Inputs, LayerKv, HeadShape], Traced],
    shape: HeadShape | LayerShape,
    backend: Any = "inductor",
) -> Layer:
    """*layer* (a plain function) compiled, with its own compilations, which die with it.

    *traced*: of the ops that the layer is called with; *shape*: the heads of this rank; *backend*: torch.compile's.
    Calls raise what torch.compile raises, when a kind of layer first meets one position, or several.
    """
    heads = shape if isinstance(shape, HeadShape) else shape.heads
    run = torch.compile(own(layer), fullgraph=True, dynamic=False, backend=backend, options=rounding(backend))

    def call(common: Any, weights: Any, window: int | None, kv: LayerKv, x: Inputs, stream: Stream) -> Stream:
        step = x.memo.once(("traced", kv.layout), x.table, lambda: unseen(traced(x, kv, heads)))
        _mark_positions(stream.residual_TD, stream.pending_TD)
        _mark_blocks(kv)
        with torch.no_grad():  # whether gradients are on is part of what is compiled
            return run(common, weights, window, kv, cast(Inputs, step), stream)

    return call


def rounding(backend: Any) -> dict[str, Any] | None:
    """Options of torch.compile: inductor rounds to 16 bits wherever eager ops do, not only what it stores."""
    return {"emulate_precision_casts": True} if backend == "inductor" else None


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a plain *function* with code of its own: torch.compile keeps and counts compilations by code object."""
    plain = cast(FunctionType, function)
    return FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )


def unseen(step: Traced) -> Traced:
    """*step*, marked: the positions are any number, and a compiler assumes nothing of the sizes of *rows*."""
    from torch._dynamo.decorators import mark_unbacked

    _mark_positions(step.positions, step.slots)
    for tensor in step.rows:
        for dim in range(tensor.dim()):
            mark_unbacked(tensor, dim)
    return step


def _mark_positions(*tensors: Tensor | None) -> None:
    """The first dimension is any number; of one position a compiler makes a case of its own."""
    from torch._dynamo.decorators import mark_dynamic

    for tensor in tensors:
        if tensor is not None:
            mark_dynamic(tensor, 0)


def _mark_blocks(kv: LayerKv) -> None:
    """So is the number of blocks: a trial at start has fewer."""
    _mark_positions(kv.k, kv.v)
