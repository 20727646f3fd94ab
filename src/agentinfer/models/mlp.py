"""The feed-forward half of a layer: a dense MLP, or a router with its experts. Weights, packing, and their calls.

Shapes: T positions, D model width, F feed-forward width, E experts, G width of the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.models.expert_config import ExpertConfig
from agentinfer.models.weights import Spec
from agentinfer.ops.comm import Group
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.provide import Ops, Stream

A = TypeVar("A")
B = TypeVar("B")


@frozen(eq=False)
class Mlp(Generic[A]):
    """A gated MLP, as the checkpoint has it."""

    gate: A
    up: A
    down: A


@frozen(eq=False)
class Experts(Generic[A]):
    """A router and its experts, as the checkpoint has them."""

    router: A
    bias: A | None
    each: tuple[Mlp[A], ...]
    shared: Mlp[A] | None


@frozen(eq=False)
class PackedMlp(Generic[A]):
    """A gated MLP as forward reads it."""

    gate_up: A
    """[2F, D], gate first."""
    down: A


@frozen(eq=False)
class PackedExperts(Generic[A]):
    """A router and its experts as forward reads them: all experts in two tensors."""

    router: A
    bias: A | None
    gate_up: A
    """[E * 2F, D] as packed, [E, 2F, D] once `stacked`."""
    down: A
    """[E * D, F] as packed, [E, D, F] once `stacked`."""
    shared: PackedMlp[A] | None


def mlp_specs(prefix: str, hidden: int, width: int) -> Mlp[Spec]:
    """The weights of an MLP under *prefix*, cut by width."""
    return Mlp(
        gate=Spec(prefix + "gate_proj.weight", (width, hidden), 0, pad=True),
        up=Spec(prefix + "up_proj.weight", (width, hidden), 0, pad=True),
        down=Spec(prefix + "down_proj.weight", (hidden, width), 1, pad=True),
    )


def expert_specs(c: ExpertConfig, prefix: str, hidden: int) -> Experts[Spec]:
    """The weights of a layer of experts under *prefix*: each expert cut by width, the router whole and in float32."""
    wide = torch.float32
    bias = Spec(prefix + "gate.e_score_correction_bias", (c.num_experts,), dtype=wide, kind="bias")
    shared = mlp_specs(prefix + "shared_experts.", hidden, c.shared_width)
    return Experts(
        router=Spec(prefix + "gate.weight", (c.num_experts, hidden), dtype=wide),
        bias=bias if c.biased else None,
        each=tuple(mlp_specs(f"{prefix}experts.{i}.", hidden, c.width) for i in range(c.num_experts)),
        shared=shared if c.shared_width else None,
    )


def pack_mlp(w: Mlp[A], join: Callable[[tuple[A, ...]], B]) -> PackedMlp[B]:
    """Rows of gate and up under each other."""
    return PackedMlp(join((w.gate, w.up)), join((w.down,)))


def pack_experts(w: Experts[A], join: Callable[[tuple[A, ...]], B]) -> PackedExperts[B]:
    """Rows of all experts under each other: of each its gate, then its up."""
    return PackedExperts(
        router=join((w.router,)),
        bias=None if w.bias is None else join((w.bias,)),
        gate_up=join(tuple(x for expert in w.each for x in (expert.gate, expert.up))),
        down=join(tuple(expert.down for expert in w.each)),
        shared=None if w.shared is None else pack_mlp(w.shared, join),
    )


def pack_ffn(
    w: Mlp[A] | Experts[A], join: Callable[[tuple[A, ...]], B]
) -> PackedMlp[B] | PackedExperts[B]:  # fmt: skip
    """An MLP, or experts, as forward reads them."""
    return pack_mlp(w, join) if isinstance(w, Mlp) else pack_experts(w, join)


def stacked(
    w: PackedMlp[Tensor] | PackedExperts[Tensor], num_experts: int
) -> PackedMlp[Tensor] | PackedExperts[Tensor]:
    """*w*, where it is experts with one matrix an expert; views of the same memory."""
    if isinstance(w, PackedMlp):
        return w

    def by_expert(x: Tensor) -> Tensor:
        return x.view(num_experts, -1, x.shape[-1])

    return evolve(w, gate_up=by_expert(w.gate_up), down=by_expert(w.down))


def expert_shape(c: ExpertConfig, tp: int) -> ExpertShape | None:
    """The experts of one of *tp* ranks; None where no layer has any."""
    return ExpertShape(c.num_experts, c.routing.top_k, -(-c.width // tp)) if any(c.layers) else None


def feed_forward(
    ops: Ops, tp: Group, routing: Routing, eps: float, norm: Tensor, w: PackedMlp[Tensor] | PackedExperts[Tensor],
    stream: Stream,
) -> Stream:  # fmt: skip
    """The second half of a layer, its norm first."""
    if isinstance(w, PackedMlp):
        act_TF, stream = ops.norm_gate_up(stream, norm, w.gate_up, None, eps)
        return ops.down_add(act_TF, w.down, None, stream, tp)
    normed_TD, weights_TK, experts_TK, stream = ops.norm_route(stream, norm, w.router, w.bias, routing, eps)
    gate_up, down = (None, None) if w.shared is None else (w.shared.gate_up, w.shared.down)
    return ops.experts_add(normed_TD, weights_TK, experts_TK, w.gate_up, w.down, gate_up, down, stream, tp)
