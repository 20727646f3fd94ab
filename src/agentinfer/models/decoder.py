"""What all decoders have around their layers: embedding, final norm and head; and one pass through the layers.

A model's own file says what a layer's weights are and what a layer does.

Shapes: S samples, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from attrs import frozen
from torch import Tensor

from agentinfer.models.weights import Spec
from agentinfer.ops.comm import ONE, Ranks
from agentinfer.ops.compiled import Layer
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import Donated, KvCache
from agentinfer.ops.provide import Ops

A = TypeVar("A")
B = TypeVar("B")
L = TypeVar("L")
P = TypeVar("P")


@frozen(eq=False)
class Weights(Generic[L, A]):
    """All weights, as the checkpoint has them or packed; a layer's are L."""

    embed: A
    layers: tuple[L, ...]
    norm: A
    head: A | None
    """None: the embedding is the head."""


@frozen(eq=False)
class Ready(Generic[L]):
    """What forward reads: this rank's packed weights, and the rope table that all layers share."""

    embed: Tensor
    """[V / tp, D]"""
    layers: tuple[L, ...]
    norm: Tensor
    head: Tensor
    """[V / tp, D]; the embedding itself where they are tied."""
    cos_sin: Tensor
    """[max_positions, rotated numbers of a head] float32: first half cos, second half sin."""


def around(layers: Iterable[L], vocab_size: int, hidden_size: int, *, tied: bool) -> Weights[L, Spec]:
    """*layers* with the weights around them."""
    return Weights(
        embed=Spec("model.embed_tokens.weight", (vocab_size, hidden_size), 0, pad=True),
        layers=tuple(layers),
        norm=Spec("model.norm.weight", (hidden_size,), kind="norm"),
        head=None if tied else Spec("lm_head.weight", (vocab_size, hidden_size), 0, pad=True),
    )


def optional(join: Callable[[tuple[A, ...]], B], *parts: A | None) -> B | None:
    """Those of *parts* that are there, joined; None if none is."""
    there = tuple(x for x in parts if x is not None)
    return join(there) if there else None


def pack(w: Weights[L, A], join: Callable[[tuple[A, ...]], B], layer: Callable[[L], P]) -> Weights[P, B]:
    """*w* with *layer* made of each of its layers. *join* puts rows under each other."""
    return Weights(
        join((w.embed,)), tuple(layer(x) for x in w.layers), join((w.norm,)), optional(join, w.head)
    )  # fmt: skip


def ready(w: Weights[L, Tensor], cos_sin: Tensor, layer: Callable[[L], L] = lambda x: x) -> Ready[L]:
    """Packed weights with their rope table; *layer* makes the last change to each of the layers."""
    head = w.embed if w.head is None else w.head
    return Ready(w.embed, tuple(layer(x) for x in w.layers), w.norm, head, cos_sin)


def forward(
    w: Ready[Any], ops: Ops, ranks: Ranks, kv: Donated[KvCache], x: Inputs, run: Layer, shared: Any,
    windows: Iterable[int | None], eps: float, vocab_size: int,
) -> tuple[Tensor, KvCache]:  # fmt: skip
    """Logits of the wanted positions, [S, V] float32, and the KV cache with this step's. *Donates* kv. Where *ranks*
    leave logits in parts, V is as long as the part.

    *run* does each layer, given what all of them *shared* and its own of *windows*.
    """
    kv = kv.consume("forward")
    stream = ops.embed(x.ids, w.embed, ranks.tp)
    for weights, cache, window in zip(w.layers, kv.layers, windows, strict=True):
        stream = run(shared, weights, window, cache, x, stream)
    group, width = (ONE, len(w.head)) if ranks.parts else (ranks.tp, vocab_size)
    return ops.norm_head(stream, x.samples, w.norm, w.head, eps, group, width), kv
