"""Attention on a GPU as torch custom operators, opaque to torch.compile: our norm, rope and KV write, our tiles, our
decode kernel, vLLM's FlashAttention-3. The rest of a layer is plain torch there, which is what a compiler fuses.

Importing this module registers `torch.ops.agentinfer.*` (see `custom`, whose operators these stand beside). Operators
take tensors and numbers only. What the host must know of a step is made before compiled code runs, and what of it
differs from step to step travels in tensors on the CPU: a number would be part of what is compiled.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, X = (N + 2 H) D, B tokens a block, M table columns,
W tiles.
"""

from __future__ import annotations

from typing import cast

import torch
from attrs import astuple, evolve
from torch import Tensor

from agentinfer.ops import vllm_ops
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kernels import attend_decode, attend_prefill, qk_rope_write
from agentinfer.ops.kernels.attend_decode import COUNTERS
from agentinfer.ops.kernels.attend_prefill import Tile, single_tile
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops, Traced, reference, uniform
from agentinfer.ops.ragged import Work, check_heads, work_of

DECODE, TILES, FA3 = range(3)
"""Who attends a step."""


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


@torch.library.custom_op("agentinfer::attend_step", mutates_args=("k_cache", "v_cache", "counters"))
def attend_step(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor, rows: Tensor, table: Tensor,
    cu_seqlens_q: Tensor, context: Tensor, chunks: Tensor, singles: Tensor, counters: Tensor, numbers: Tensor,
    num_heads: int, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float,
    window: int,
) -> Tensor:  # fmt: skip
    """Ops.attend of any step, [T, N * D]: what `traced_step` says, in its order. A *window* of 0 is off."""
    kind, max_query, max_context, *sizes = cast(list[int], numbers.tolist())
    if kind == DECODE:
        return attend_decode.attend_decode(
            qkv, k_cache, v_cache, table, rows, context, slots, num_heads, cos_sin, q_norm, k_norm, eps, scale,
            window or None, counters,
        )  # fmt: skip
    q = qk_rope_write.qk_rope_write(
        qkv, k_cache, v_cache, positions, slots, num_heads, cos_sin, q_norm, k_norm, eps
    )  # fmt: skip
    if kind == FA3:
        out = vllm_ops.attend_fa3(
            q, k_cache, v_cache, table, cu_seqlens_q, context, max_query, max_context, scale, window or None
        )  # fmt: skip
        return out.flatten(1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for tiles, size in ((chunks, sizes[:4]), (singles, sizes[4:])):
        if len(tiles):
            attend_prefill.attend_tiles(q, k_cache, v_cache, table, tiles, out, scale, window or None, Tile(*size))
    return out.flatten(1)


@attend_step.register_fake
def _(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor, rows: Tensor, table: Tensor,
    cu_seqlens_q: Tensor, context: Tensor, chunks: Tensor, singles: Tensor, counters: Tensor, numbers: Tensor,
    num_heads: int, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float,
    window: int,
) -> Tensor:  # fmt: skip
    del v_cache, positions, slots, rows, table, cu_seqlens_q, context, chunks, singles, counters, numbers
    del cos_sin, q_norm, k_norm, eps, scale, window
    return torch.empty((qkv.shape[0], num_heads * k_cache.shape[-1]), dtype=qkv.dtype, device=qkv.device)


def traced_step(x: Inputs, kv: LayerKv, shape: HeadShape, *, fa3: bool) -> Traced:
    """A step for `attend_step`: one query a row goes to the decode kernel, several to our tiles, or to FlashAttention-3
    if *fa3*. Raises GraphBinding for several in a captured graph unless *fa3*.
    """
    kind = DECODE if x.max_query == 1 and len(x.ids) == len(x.rows) else FA3 if fa3 else TILES
    dtype, size, where = kv.layout.dtype, kv.layout.block_size, x.table.device
    single = single_tile(dtype)
    work = work_of(x, shape, dtype, size) if kind == TILES else Work(None, single, None, single)
    # Two tensors, not one twice: who is the same as whom is part of what is compiled.
    no_chunks, no_singles = (torch.empty((0, 4), dtype=torch.int32, device=where) for _ in range(2))
    numbers = (kind, x.max_query, x.max_context, *astuple(work.chunk), *astuple(work.single))
    rows = (
        x.rows,
        tables_of(x, size) if kind == FA3 else x.table,
        x.cu_seqlens_q,
        x.context,
        no_chunks if work.chunks is None else work.chunks,
        no_singles if work.singles is None else work.singles,
        torch.zeros(COUNTERS, dtype=torch.int32, device=where),
        torch.tensor(numbers, dtype=torch.int64),
    )
    return Traced(x.positions, x.slots, rows)


def opaque_gpu_ops(*, fa3: bool) -> Ops:
    """The reference in plain torch, whose attention is `attend_step`: for torch.compile to trace whole.

    *fa3*: vLLM's FlashAttention-3 for steps of several queries a row, instead of our tiles; raises InvalidSetting if it
    is not there.
    """
    if fa3:
        vllm_ops.load_attention()

    def traced(x: Inputs, kv: LayerKv, shape: HeadShape) -> Traced:
        return traced_step(x, kv, shape, fa3=fa3)

    def attend(
        qkv_TX: Tensor, kv: LayerKv, x: Inputs | Traced, shape: HeadShape, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        check_heads(shape, kv, qkv_TX.dtype, cos_sin, q_norm, k_norm)
        step = x if isinstance(x, Traced) else traced(x, kv, shape)
        return attend_step(
            qkv_TX, kv.k, values_of(kv), step.positions, step.slots, *step.rows, shape.num_heads, cos_sin, q_norm,
            k_norm, eps, scale, window or 0,
        )  # fmt: skip

    return evolve(uniform(reference()), name="opaque-gpu", attend=attend, traced=traced)
