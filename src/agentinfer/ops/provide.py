"""Ops: the record of callables that models are written in, and its makers. Chosen once, passed in Machine.

A dense layer is five calls (norm_qkv, attend, out_add, norm_gate_up, down_add) between embed and norm_head. Latent
attention is norm_latent and attend_latent in place of the first two, a layer of experts norm_route and experts_add in
place of the last two. A maker either composes them of primitives (`composed`) or brings its own.

Shapes: T positions, S samples, D model width, X local qkv width, F local gate width (of one expert), V local
vocabulary, N / H local query / KV heads; U, P, L, C, O as in `mla`, Q the width of a query's latent, A that of all that
comes down; E, K as in `moe`, G local width of shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import attention, edit, linear, mla, moe, norm, rope, sample
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Group
from agentinfer.ops.edit import EditRows, EnterRows
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.parts import PartRows
from agentinfer.ops.sample import Sample, SampleRows
from agentinfer.ops.scaled import Weight

__all__ = [
    "HeadShape", "LayerShape", "Ops", "Primitives", "Stream", "Traced", "composed", "lacking", "reference", "uniform",
]  # fmt: skip


@frozen
class LayerShape:
    """What the layers of a model are made of on one rank, where they are more than dense layers of some heads."""

    heads: HeadShape
    """Of latent attention those of its absorbed form: one KV head, as wide as what is cached of a token."""
    latent: LatentShape | None
    experts: ExpertShape | None


class Stream(NamedTuple):
    """What travels between the calls of a layer. Opaque to models: only Ops of the maker that made it look inside.

    A tuple, because torch.compile traces how a tuple is made, and not how an attrs record is.
    """

    residual_TD: Tensor
    pending_TD: Tensor | None
    """To be added to the residual by the next norm call."""
    unsummed: Group | None = None
    """Over whose ranks what is pending has still to be summed, rounded to the model's dtype before; None: nobody's."""


@frozen(eq=False)
class Traced:
    """A step as tensors alone: what compiled attention takes in place of Inputs. Made once a step, outside of what is
    compiled, so that nothing in it makes one step another case than the last.
    """

    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64."""
    rows: tuple[Tensor, ...]
    """What the attention operator of these ops reads of the rows, in its own order. Not for a compiler to look at."""


Matrix = Any
"""A weight of a product: Tensor, or Scaled where the maker has products in 8 bits, which `choose` knows."""


@frozen(eq=False)
class Primitives:
    """The numeric kernels that the calls of a layer are composed of. Each is defined by its torch reference of that
    name.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x, weight, eps)."""
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x, residual, weight, eps) -> (normed, residual + x)."""
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """(positions, q, k, cos_sin, interleaved) -> (q, k)."""
    write_kv: Callable[[Tensor, Tensor, LayerKv, Tensor], None]
    """(k, v, kv, slots)."""
    paged_attention: Callable[[Tensor, LayerKv, Inputs, float, int | None], Tensor]
    """(q, kv, inputs, scale, window) -> [T, N, D]."""
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    """(x, weight, bias)."""


Attend = Callable[
    [Tensor, LayerKv, Inputs, HeadShape, Tensor, Tensor | None, Tensor | None, float, float, int | None],
    Tensor,
]
NormLatent = Callable[
    [Stream, Tensor, Matrix, Tensor | None, Matrix | None, LatentShape, float, float], tuple[Tensor, Tensor, Stream]
]
AttendLatent = Callable[[Tensor, Tensor, LayerKv, Inputs, LatentShape, Tensor, Tensor, Tensor, float, float], Tensor]
NormRoute = Callable[[Stream, Tensor, Tensor, Tensor | None, Routing, float], tuple[Tensor, Tensor, Tensor, Stream]]
ExpertsAdd = Callable[[Tensor, Tensor, Tensor, Matrix, Matrix, Matrix | None, Matrix | None, Stream, Group], Stream]

RowStep = Callable[
    [Any, HeadShape, Sequence[int | None], float, float, Group, Sequence[LayerKv], Inputs],
    Tensor,
]


@frozen(eq=False)
class Ops:
    """Weights are this rank's shard, packed. Calls are positional, in the order given here."""

    name: str
    embed: Callable[[Tensor, Tensor, Group], Stream]
    """(ids_T, weight_VD, group): rows of the vocabulary-parallel table."""
    norm_qkv: Callable[[Stream, Tensor, Matrix, Tensor | None, float], tuple[Tensor, Stream]]
    """(stream, norm_D, weight_XD, bias_X, eps) -> (qkv_TX, stream): rows Q heads, K heads, V heads, local."""
    attend: Attend
    """(qkv_TX, kv, inputs, shape, cos_sin, q_norm_D, k_norm_D, eps, scale, window) -> [T, N * D]: q/k norm a head, neox
    rope, KV write, attention."""
    out_add: Callable[[Tensor, Matrix, Tensor | None, Stream, Group], Stream]
    """(attn_TX, weight_DX, bias_D, stream, group): row parallel, summed over the ranks, bias once."""
    norm_gate_up: Callable[[Stream, Tensor, Matrix, Tensor | None, float], tuple[Tensor, Stream]]
    """(stream, norm_D, weight, bias, eps) -> (silu(gate) * up [T, F], stream); gate rows first."""
    down_add: Callable[[Tensor, Matrix, Tensor | None, Stream, Group], Stream]
    """(act_TF, weight_DF, bias_D, stream, group): as out_add."""
    norm_head: Callable[[Stream, Tensor, Tensor, Tensor, float, Group, int], Tensor]
    """(stream, samples_S, norm_D, weight_VD, eps, group, vocab_size) -> [S, vocab_size] float32."""
    norm_latent: NormLatent
    """(stream, norm_D, down_AD, q_norm_Q, q_up_XQ, shape, eps, latent eps) -> (q [T, N * (U + P)], latent [T, C],
    stream). Rows of *down*: the query or, with *q_norm* and *q_up*, its latent, which is normed and taken up; then the
    C rows of keys and values. Rows of the results may lie apart. Nothing is rotated yet, the latent not normed."""
    attend_latent: AttendLatent
    """(q, latent, kv, inputs, shape, cos_sin, kv_norm_L, kv_b, scale, latent eps) -> [T, N * O]: norm of the latent,
    rope, cache write, attention. *kv_b* is [N, U + O, L]."""
    norm_route: NormRoute
    """(stream, norm_D, router_ED, bias_E, routing, eps) -> (normed [T, D], weights [T, K] float32, experts [T, K]
    int64, stream): `moe.route` of the normed positions. *router* and *bias* are float32. Where experts are spread over
    the ranks, *experts* are numbers among this rank's, and -1 where another has it."""
    experts_add: ExpertsAdd
    """(normed, weights, experts, gate_up [E, 2F, D], down [E, D, F], shared gate_up [2G, D], shared down [D, G],
    stream, group) -> stream: the weighted experts of each position and, where there are some, the shared ones,
    unweighted; summed over the ranks once."""
    primitives: Primitives
    sample: Sample = sample.sample
    """(logits_SV, sampling) -> tokens [S] int64, ok [S] bool."""
    sample_rows: SampleRows | None = None
    """Sampling that a graph can capture; None: these ops wait for the host, so no graph can be made of them."""
    part_rows: PartRows | None = None
    """The same of logits that are cut over ranks; None: it is done on the host."""
    edit_rows: EditRows = edit.edit_rows
    """(logits_SV, inputs, tables) -> [P, V] float32: some rows, with their bias, penalties and bans."""
    enter_rows: EnterRows = edit.enter_rows
    """(found_2P, inputs, chosen_2S, last, tables): writes what was found of those rows into the last three."""
    row_step: RowStep | None = None
    """(weights of a dense decoder, heads, windows, eps, scale, group, kv, inputs) -> logits [1, vocab_size] float32: a
    whole forward pass of one position with one sample; None: layer by layer, as all others."""
    traced: Callable[[Inputs, LayerKv, HeadShape], Traced] | None = None
    """What attend takes in place of Inputs where it is compiled; None: torch.compile can not trace these ops whole."""


def _embed(ids_T: Tensor, weight_VD: Tensor, group: Group) -> Stream:
    return Stream(linear.embedding(ids_T, weight_VD, group), None)


def _row_add(x: Tensor, weight: Weight, bias: Tensor | None, stream: Stream, group: Group) -> Stream:
    y = linear.row_parallel(x, weight, bias, group)
    if stream.pending_TD is not None:
        y += stream.pending_TD
    return Stream(stream.residual_TD, y)


def _normed(p: Primitives, stream: Stream, norm_D: Tensor, eps: float) -> tuple[Tensor, Stream]:
    if stream.pending_TD is None:
        return p.rms_norm(stream.residual_TD, norm_D, eps), stream
    normed, residual = p.fused_add_rms_norm(stream.pending_TD, stream.residual_TD, norm_D, eps)
    return normed, Stream(residual, None)


def composed(name: str, p: Primitives, attend: Attend | None = None) -> Ops:
    """The calls of a layer, composed of *p*; *attend* replaces the one that would be."""

    def norm_linear(
        stream: Stream, norm_D: Tensor, weight: Weight, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Stream]:
        normed, stream = _normed(p, stream, norm_D, eps)
        return p.linear(normed, weight, bias), stream

    def norm_gate_up(
        stream: Stream, norm_D: Tensor, weight: Weight, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Stream]:
        gate_up, stream = norm_linear(stream, norm_D, weight, bias, eps)
        return p.silu_and_mul(gate_up), stream

    def norm_head(
        stream: Stream, samples_S: Tensor, norm_D: Tensor, weight_VD: Tensor, eps: float, group: Group, vocab_size: int
    ) -> Tensor:
        residual = stream.residual_TD.index_select(0, samples_S)
        if stream.pending_TD is None:
            normed = p.rms_norm(residual, norm_D, eps)
        else:
            normed, _ = p.fused_add_rms_norm(stream.pending_TD.index_select(0, samples_S), residual, norm_D, eps)
        return linear.head(normed, weight_VD, group, vocab_size)

    def attend_composed(
        qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        q, k, v = split_heads(qkv_TX, shape)
        if (q_norm is None) != (k_norm is None):
            raise ValueError("queries and keys are normed both or neither; one norm weight is missing")
        q = q if q_norm is None else p.rms_norm(q.contiguous(), q_norm, eps)
        k = k if k_norm is None else p.rms_norm(k.contiguous(), k_norm, eps)
        q, k = p.rotary_embedding(x.positions, q, k, cos_sin, False)  # noqa: FBT003 - positional, as the contract of the primitive
        p.write_kv(k, v, kv, x.slots)
        return p.paged_attention(q, kv, x, scale, window).flatten(1)

    return Ops(
        name=name,
        embed=_embed,
        norm_qkv=norm_linear,
        attend=attend_composed if attend is None else attend,
        out_add=_row_add,
        norm_gate_up=norm_gate_up,
        down_add=_row_add,
        norm_head=norm_head,
        norm_latent=partial(_norm_latent, p),
        attend_latent=partial(_attend_latent, p),
        norm_route=partial(_norm_route, p),
        experts_add=partial(_experts_add, p),
        primitives=p,
    )


def _norm_latent(
    p: Primitives, stream: Stream, norm_D: Tensor, down_AD: Weight, q_norm: Tensor | None, q_up: Weight | None,
    shape: LatentShape, eps: float, latent_eps: float,
) -> tuple[Tensor, Tensor, Stream]:  # fmt: skip
    normed, stream = _normed(p, stream, norm_D, eps)
    down = p.linear(normed, down_AD, None)
    q, latent = down[:, : -shape.cached_dim], down[:, -shape.cached_dim :]
    if (q_norm is None) != (q_up is None):
        raise ValueError("a query's latent is normed and taken up, or there is none; one of two weights is missing")
    if q_norm is not None and q_up is not None:
        q = p.linear(p.rms_norm(q.contiguous(), q_norm, latent_eps), q_up, None)
    return q, latent, stream


def _attend_latent(
    p: Primitives, q_TX: Tensor, latent_TC: Tensor, kv: LayerKv, x: Inputs, shape: LatentShape, cos_sin: Tensor,
    kv_norm_L: Tensor, kv_b: Tensor, scale: float, latent_eps: float,
) -> Tensor:  # fmt: skip
    q = q_TX.view(len(q_TX), shape.num_heads, shape.query_dim)
    latent, key = latent_TC[:, : shape.latent_dim], latent_TC[:, shape.latent_dim :].unsqueeze(1)
    latent = p.rms_norm(latent.contiguous(), kv_norm_L, latent_eps)
    turned, key = p.rotary_embedding(x.positions, q[..., shape.nope_dim :], key, cos_sin, shape.interleaved)
    mla.write_latent(latent, key.squeeze(1), kv, x.slots)
    q = torch.cat((q[..., : shape.nope_dim], turned), dim=-1)
    return mla.latent_attention(q, kv, x, shape, kv_b, scale).flatten(1)


def _norm_route(
    p: Primitives, stream: Stream, norm_D: Tensor, router_ED: Tensor, bias_E: Tensor | None, routing: Routing,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Stream]:  # fmt: skip
    normed, stream = _normed(p, stream, norm_D, eps)
    weights, experts = moe.route(moe.router_logits(normed, router_ED), bias_E, routing)
    return normed, weights, experts, stream


def _experts_add(
    p: Primitives, normed: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Weight, down_EDF: Weight,
    shared_gate_up: Weight | None, shared_down: Weight | None, stream: Stream, group: Group,
) -> Stream:  # fmt: skip
    y = moe.experts(normed, weights_TK, experts_TK, gate_up_EFD, down_EDF)
    if (shared_gate_up is None) != (shared_down is None):
        raise ValueError("shared experts have two weights, or there are none; one is missing")
    if shared_gate_up is not None and shared_down is not None:
        y += p.linear(p.silu_and_mul(p.linear(normed, shared_gate_up, None)), shared_down, None)
    y = group.all_reduce_sum(y.to(normed.dtype))
    if stream.pending_TD is not None:
        y = y + stream.pending_TD
    return Stream(stream.residual_TD, y)


def lacking(maker: str, what: str) -> Callable[..., Any]:
    """The call of a *maker* that has no kernels for *what* yet: it raises InvalidSetting, naming both."""

    def refuse(*arguments: object) -> Any:
        del arguments
        raise InvalidSetting("ops", f"{maker}: no {what} yet; ops reference has it")

    return refuse


def uniform(ops: Ops) -> Ops:
    """*ops* whose first layer has something pending (zeros), as all others have: one compilation serves them all."""

    def embed(ids_T: Tensor, weight_VD: Tensor, group: Group) -> Stream:
        residual, pending, _ = ops.embed(ids_T, weight_VD, group)
        return Stream(residual, torch.zeros_like(residual) if pending is None else pending)

    return evolve(ops, embed=embed)


def split_heads(qkv_TX: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the query, key and value heads: [T, N, D], [T, H, D], [T, H, D]."""
    heads = qkv_TX.view(len(qkv_TX), -1, shape.head_dim)
    keys, values = shape.num_heads, shape.num_heads + shape.num_kv_heads
    return heads[:, :keys], heads[:, keys:values], heads[:, values:]


def attend_reference(
    qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Ops.attend in few torch calls: queries and keys are normed and rotated together, what no layer changes is
    computed once a step.
    """
    count, turned = shape.num_heads, shape.num_heads + shape.num_kv_heads
    heads = qkv_TX.view(len(qkv_TX), -1, shape.head_dim)
    qk = heads[:, :turned]
    if q_norm is not None and k_norm is not None:
        weight = torch.cat((q_norm.expand(count, -1), k_norm.expand(shape.num_kv_heads, -1)))
        qk = norm.rms_norm(qk, weight, eps)
    elif q_norm is not None or k_norm is not None:
        raise ValueError("queries and keys are normed both or neither; one norm weight is missing")
    cos, sin = x.memo.once("rope", cos_sin, lambda: rope.gather_rope(cos_sin, x.positions, interleaved=False))
    qk = rope.rotate(qk, cos, sin, interleaved=False)
    attention.write_kv(qk[:, count:], heads[:, turned:], kv, x.slots)
    return attention.paged_attention(qk[:, :count], kv, x, scale, window).flatten(1)


def reference() -> Ops:
    """Plain torch, float32 inside, on any device: what every other maker is checked against."""
    primitives = Primitives(
        rms_norm=norm.rms_norm,
        fused_add_rms_norm=norm.fused_add_rms_norm,
        silu_and_mul=norm.silu_and_mul,
        rotary_embedding=rope.rotary_embedding,
        write_kv=attention.write_kv,
        paged_attention=attention.paged_attention,
        linear=linear.linear,
    )
    return composed("reference", primitives, attend_reference)
