"""Attention on a GPU as torch custom operators, opaque to torch.compile: our norm, rope and KV write, our tiles, vLLM's
FlashAttention-3. The rest of a layer is plain torch there, which is what a compiler fuses.

Importing this module registers `torch.ops.agentinfer.*` (see `custom`, whose operators these stand beside). Operators
take tensors and numbers only: what the host must know of a step (`ragged.work_of`) is made before compiled code runs.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, X = (N + 2 H) D, B tokens a block, M table columns.
"""

from __future__ import annotations

import torch
from attrs import astuple, evolve, frozen
from torch import Tensor

from agentinfer.ops import vllm_ops
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kernels import attend_prefill, qk_rope_write
from agentinfer.ops.kernels.attend_prefill import Tile
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops, reference
from agentinfer.ops.ragged import Work, check_heads, work_of


@torch.library.custom_op("agentinfer::qk_rope_write", mutates_args=("k_cache", "v_cache"))
def qk_rope_write_op(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor, num_heads: int, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """kernels.qk_rope_write: the queries, [T, N, D]."""
    return qk_rope_write.qk_rope_write(
        qkv, k_cache, v_cache, positions, slots, num_heads, cos_sin, q_norm, k_norm, eps
    )  # fmt: skip


@qk_rope_write_op.register_fake
def _(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor, num_heads: int, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    del v_cache, positions, slots, cos_sin, q_norm, k_norm, eps
    return torch.empty((qkv.shape[0], num_heads, k_cache.shape[-1]), dtype=qkv.dtype, device=qkv.device)


@torch.library.custom_op("agentinfer::attend_work", mutates_args=())
def attend_work(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, chunks: Tensor | None, chunk: list[int],
    singles: Tensor | None, single: list[int], scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of all queries of the two work lists, by `attend_tiles`; *chunk* and *single* are the numbers of their
    Tiles, a *window* of 0 is off.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for tiles, size in ((chunks, chunk), (singles, single)):
        if tiles is not None:
            attend_prefill.attend_tiles(q, k_cache, v_cache, table, tiles, out, scale, window or None, Tile(*size))
    return out


@attend_work.register_fake
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, chunks: Tensor | None, chunk: list[int],
    singles: Tensor | None, single: list[int], scale: float, window: int,
) -> Tensor:  # fmt: skip
    del k_cache, v_cache, table, chunks, chunk, singles, single, scale, window
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("agentinfer::attend_fa3", mutates_args=())
def attend_fa3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, cu_seqlens_q: Tensor, context: Tensor, max_query: int,
    max_context: int, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """vllm_ops.attend_fa3; a *window* of 0 is off."""
    return vllm_ops.attend_fa3(
        q, k_cache, v_cache, table, cu_seqlens_q, context, max_query, max_context, scale, window or None
    )  # fmt: skip


@attend_fa3.register_fake
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, cu_seqlens_q: Tensor, context: Tensor, max_query: int,
    max_context: int, scale: float, window: int,
) -> Tensor:  # fmt: skip
    del k_cache, v_cache, table, cu_seqlens_q, context, max_query, max_context, scale, window
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@frozen(eq=False)
class Rows:
    """What an opaque attention needs to know of a step: made once a step, outside of what is compiled."""

    positions: Tensor
    slots: Tensor
    table: Tensor
    """Of all rows for our tiles ([rows + 1, M]), of this step's rows ([R, C]) for FlashAttention-3."""
    cu_seqlens_q: Tensor
    context: Tensor
    max_query: int
    max_context: int
    work: Work | None
    """None: FlashAttention-3."""


def rows_of(x: Inputs, shape: HeadShape, dtype: torch.dtype, block_size: int, *, fa3: bool) -> Rows:
    """The Rows of a step. Raises GraphBinding in a captured graph unless *fa3*."""
    work = None if fa3 else work_of(x, shape, dtype, block_size)
    table = tables_of(x, block_size) if fa3 else x.table
    return Rows(x.positions, x.slots, table, x.cu_seqlens_q, x.context, x.max_query, x.max_context, work)


def attend_opaque(
    qkv_TX: Tensor, kv: LayerKv, rows: Rows, shape: HeadShape, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Ops.attend by operators, [T, N * D], for torch.compile to trace with fullgraph: takes Rows in place of Inputs."""
    k, v = kv.k, values_of(kv)
    q = qk_rope_write_op(
        qkv_TX, k, v, rows.positions, rows.slots, shape.num_heads, cos_sin, q_norm, k_norm, eps
    )  # fmt: skip
    if rows.work is None:
        out = attend_fa3(
            q, k, v, rows.table, rows.cu_seqlens_q, rows.context, rows.max_query, rows.max_context, scale, window or 0
        )  # fmt: skip
    else:
        work = rows.work
        chunk, single = list(astuple(work.chunk)), list(astuple(work.single))
        out = attend_work(q, k, v, rows.table, work.chunks, chunk, work.singles, single, scale, window or 0)
    return out.flatten(1)


def opaque_gpu_ops(*, fa3: bool) -> Ops:
    """The reference in plain torch, whose attention is these operators: for any mix of rows, in two bytes a number.

    *fa3*: vLLM's FlashAttention-3 instead of our tiles; raises InvalidSetting if it is not there. Its steps are those
    that torch.compile can trace whole. With our tiles the work list is made when the first layer of a step attends, on
    the host: compile from Rows (`attend_opaque`), or let that call run before.
    """
    if fa3:
        vllm_ops.load_attention()

    def attend(
        qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        check_heads(shape, kv, qkv_TX.dtype, cos_sin, q_norm, k_norm)
        rows = rows_of(x, shape, qkv_TX.dtype, kv.layout.block_size, fa3=fa3)
        return attend_opaque(qkv_TX, kv, rows, shape, cos_sin, q_norm, k_norm, eps, scale, window)

    return evolve(reference(), name="opaque-gpu", attend=attend)
