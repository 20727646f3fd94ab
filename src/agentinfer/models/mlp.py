"""The feed-forward half of a layer: a dense MLP, or a router with its experts. Weights, packing, and their calls.

Shapes: T positions, D model width, F feed-forward width, E experts, G width of the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.models.expert_config import ExpertConfig
from agentinfer.models.weights import Spec
from agentinfer.ops import scaled
from agentinfer.ops.comm import Group, Ranks
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.provide import Ops, Stream
from agentinfer.ops.scaled import Scaled

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

    gate_up: A | Scaled[A]
    """[2F, D], gate first."""
    down: A | Scaled[A]


@frozen(eq=False)
class PackedExperts(Generic[A]):
    """A router and its experts as forward reads them: all experts in two tensors."""

    router: A
    bias: A | None
    gate_up: A | Scaled[A]
    """[E * 2F, D] as packed, [E, 2F, D] once `stacked`."""
    down: A | Scaled[A]
    """[E * D, F] as packed, [E, D, F] once `stacked`."""
    shared: PackedMlp[A] | None


def mlp_specs(prefix: str, hidden: int, width: int, expert: tuple[int, int] | None = None) -> Mlp[Spec]:
    """The weights of an MLP under *prefix*, cut by width. *expert*: which one of how many it is, if it is one."""
    return Mlp(
        gate=Spec(prefix + "gate_proj.weight", (width, hidden), 0, pad=True, expert=expert, quantizable=True),
        up=Spec(prefix + "up_proj.weight", (width, hidden), 0, pad=True, expert=expert, quantizable=True),
        down=Spec(prefix + "down_proj.weight", (hidden, width), 1, pad=True, expert=expert, quantizable=True),
    )


def expert_specs(c: ExpertConfig, prefix: str, hidden: int) -> Experts[Spec]:
    """The weights of a layer of experts under *prefix*: each expert cut by width, unless `spread_experts` makes another
    thing of it; the router whole and in float32.
    """
    wide, count = torch.float32, c.num_experts
    bias = Spec(prefix + "gate.e_score_correction_bias", (c.num_experts,), dtype=wide, kind="bias")
    shared = mlp_specs(prefix + "shared_experts.", hidden, c.shared_width)
    return Experts(
        router=Spec(prefix + "gate.weight", (c.num_experts, hidden), dtype=wide),
        bias=bias if c.biased else None,
        each=tuple(mlp_specs(f"{prefix}experts.{i}.", hidden, c.width, (i, count)) for i in range(count)),
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


def stacked(w: PackedMlp[Tensor] | PackedExperts[Tensor]) -> PackedMlp[Tensor] | PackedExperts[Tensor]:
    """*w*, where it is experts with one matrix an expert that this rank has; views of the same memory."""
    if isinstance(w, PackedMlp):
        return w
    hidden, width = w.gate_up.shape[1], w.down.shape[1]
    return evolve(w, gate_up=scaled.stacked(w.gate_up, 2 * width), down=scaled.stacked(w.down, hidden))


def expert_shape(c: ExpertConfig, tp: int) -> ExpertShape | None:
    """The experts of one of *tp* ranks, cut by width; None where no layer has any."""
    return ExpertShape(c.num_experts, c.routing.top_k, -(-c.width // tp)) if any(c.layers) else None


def check_spread(c: ExpertConfig | None, name: str, ranks: int) -> None:
    """Whether each of *ranks* can have as many of the experts of a model called *name*. Raises InvalidSetting."""
    if c is None or not any(c.layers):
        raise InvalidSetting("ep", f"{name} has no experts to spread over ranks")
    if c.num_experts % ranks:
        works = ", ".join(str(n) for n in range(1, 9) if c.num_experts % n == 0)
        raise InvalidSetting("ep", f"{ranks} ranks can not share {c.num_experts} experts; these can: {works}")


def local_routing(c: ExpertConfig, ranks: Ranks) -> Routing:
    """The router of a rank, which numbers the experts as the rank has them."""
    if not ranks.ep or ranks.tp.size == 1:
        return c.routing
    held = c.num_experts // ranks.tp.size
    return evolve(c.routing, first=ranks.tp.rank * held, held=held)


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
