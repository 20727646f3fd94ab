"""The primitives as torch custom operators, opaque to torch.compile, and an Ops maker of them.

Importing this module registers `torch.ops.agentinfer.*`. Each operator calls the plain function of its name, which
stays the definition (and what the eager path calls: an operator's dispatch costs about 15 us). No operator returns an
alias of an argument.

A custom operator takes tensors and numbers, no records: so collectives become operators of one given Group (`opaque`),
and attention reads the rows' lengths from the tensors.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, B tokens a block, C table columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.ops import attention, linear, norm, provide, rope
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Group, Happens
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Traced


@torch.library.custom_op("agentinfer::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.rms_norm."""
    return norm.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    del weight, eps
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("agentinfer::fused_add_rms_norm", mutates_args=())
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """norm.fused_add_rms_norm."""
    return norm.fused_add_rms_norm(x, residual, weight, eps)


@fused_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del weight, eps
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.custom_op("agentinfer::silu_and_mul", mutates_args=())
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """norm.silu_and_mul."""
    return norm.silu_and_mul(gate_up)


@silu_and_mul.register_fake
def _(gate_up: Tensor) -> Tensor:
    return torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)


@torch.library.custom_op("agentinfer::rotary_embedding", mutates_args=())
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """rope.rotary_embedding."""
    return rope.rotary_embedding(positions, q, k, cos_sin, interleaved)


@rotary_embedding.register_fake
def _(positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    del positions, cos_sin, interleaved
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)


@torch.library.custom_op("agentinfer::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """attention.scatter_kv."""
    attention.scatter_kv(k, v, k_cache, v_cache, slots)


@write_kv.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    del k, v, k_cache, v_cache, slots


@torch.library.custom_op("agentinfer::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    cu_seqlens_q: Tensor,
    context: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """attention.paged_attention on plain tensors; a *window* of 0 is off. A row whose first block is the sink is
    padding.

    Reads the rows' lengths from the device, so not for captured graphs.
    """
    counts = cast(list[int], cu_seqlens_q.diff().tolist())
    keys = cast(list[int], context.tolist())
    sink = cast(list[int], table[:, 0].tolist()) if table.shape[1] else [0] * len(keys)
    lengths = attention.RowLengths(
        count=counts,
        context=keys,
        padding=[block == 0 or n <= 0 for block, n in zip(sink, keys, strict=True)],
    )
    index = attention.attention_index(table, lengths, k_cache.shape[1], window or None, q.dtype)
    return attention.attend_index(q, k_cache, v_cache, index, scale).contiguous()


@paged_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    cu_seqlens_q: Tensor,
    context: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    del k_cache, table, cu_seqlens_q, context, scale, window
    return torch.empty((*q.shape[:-1], v_cache.shape[-1]), dtype=q.dtype, device=q.device)


def _write_kv(k: Tensor, v: Tensor, kv: LayerKv, slots: Tensor) -> None:
    write_kv(k, v, kv.k, attention.values_of(kv), slots)


def _traced(x: Inputs, kv: LayerKv, shape: HeadShape) -> Traced:
    del shape
    return Traced(x.positions, x.slots, (tables_of(x, kv.layout.block_size), x.cu_seqlens_q, x.context))


def _paged_attention(q: Tensor, kv: LayerKv, x: Inputs | Traced, scale: float, window: int | None) -> Tensor:
    rows = x.rows if isinstance(x, Traced) else (tables_of(x, kv.layout.block_size), x.cu_seqlens_q, x.context)
    table, ends, context = rows
    return paged_attention(q, kv.k, attention.values_of(kv), table, ends, context, scale, window or 0)


def opaque_ops() -> provide.Ops:
    """The reference through custom operators, for torch.compile to trace with fullgraph. Products stay plain torch."""
    primitives = provide.Primitives(
        rms_norm=rms_norm,
        fused_add_rms_norm=fused_add_rms_norm,
        silu_and_mul=silu_and_mul,
        rotary_embedding=rotary_embedding,
        write_kv=_write_kv,
        paged_attention=_paged_attention,
        linear=linear.linear,
    )
    return evolve(provide.uniform(provide.composed("opaque", primitives)), traced=_traced)


@frozen(eq=False)
class OpaqueComm:
    """A Comm whose collectives are the custom operators of one rank."""

    reduce_op: Callable[..., Tensor]
    gather_op: Callable[..., Tensor]
    broadcast_op: Callable[..., Tensor]

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        del rank
        return self.reduce_op(x)

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        del rank
        return self.gather_op(x)

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """See Comm."""
        del rank
        return self.broadcast_op(x, source)

    def watched(self, event: Happens) -> Happens:
        """See Comm. Returns *event*."""
        return event


def opaque(group: Group, name: str) -> Group:
    """*group* with its collectives as custom operators `agentinfer::<name>_{all_reduce,all_gather,broadcast}`; a group
    of one as it is.

    *name* must be unique in the process for each rank of each group (ranks may be threads): operators are registered
    process-wide.
    """
    if group.size == 1:
        return group

    @torch.library.custom_op(f"agentinfer::{name}_all_reduce", mutates_args=())
    def all_reduce(x: Tensor) -> Tensor:
        return group.all_reduce_sum(x)

    @all_reduce.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.custom_op(f"agentinfer::{name}_all_gather", mutates_args=())
    def all_gather(x: Tensor) -> Tensor:
        return group.all_gather_last_dim(x)

    @all_gather.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] * group.size))

    @torch.library.custom_op(f"agentinfer::{name}_broadcast", mutates_args=())
    def broadcast(x: Tensor, source: int) -> Tensor:
        return group.broadcast(x, source)

    @broadcast.register_fake
    def _(x: Tensor, source: int) -> Tensor:
        del source
        return torch.empty_like(x)

    return evolve(group, comm=OpaqueComm(all_reduce, all_gather, broadcast))
