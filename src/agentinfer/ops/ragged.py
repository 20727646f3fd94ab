"""Attention of any mix of rows on a GPU, by our own kernels: two launches of tiles over one pass of norm, rope and KV
write. Knows the lengths of the rows, so it is not for captured graphs.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, X = (N + 2 H) D, W tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import HostRows, Inputs, check_tables, host_rows, put
from agentinfer.ops.kernels.attend_prefill import SINGLE_ROWS, Tile, attend_tiles, chunk_tile, single_tile
from agentinfer.ops.kernels.qk_rope_write import qk_rope_write
from agentinfer.ops.kv import LayerKv
from agentinfer.state.ids import I32

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@frozen(eq=False)
class Work:
    """The tiles of one step, on the device: [W, 4] int32 each (see `attend_tiles`); None: there are none."""

    chunks: Tensor | None
    chunk: Tile
    """What the chunks are cut for."""
    singles: Tensor | None
    single: Tile


def tiles_of(host: HostRows, rows: Sequence[int], queries: int) -> I32:
    """The rows of a step named by *rows*, cut in tiles of at most *queries* queries, those with most keys first.
    [W, 4] int32: first flat position, queries, position of the first, row of the table.

    A row of padding (row 0, or without context) has tiles whose positions are negative: they see no key.
    """
    first = np.cumsum((0, *host.count))[list(rows)]
    count = np.array([host.count[i] for i in rows], np.int64)
    context = np.array([host.context[i] if host.rows[i] else 0 for i in rows], np.int64)
    start = np.where(context > 0, context - count, -count)
    cuts = -(-count // queries)
    row = np.repeat(np.arange(len(count)), cuts)
    at = (np.arange(len(row)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * queries
    size = np.minimum(queries, count[row] - at)
    position = np.where(context[row] > 0, start[row] + at, -size)
    tiles = np.stack((first[row] + at, size, position, np.array(host.rows)[list(rows)][row]), axis=1)
    return tiles[np.argsort(-(position + size), kind="stable")].astype(np.int32)


def work_of(x: Inputs, shape: HeadShape, dtype: torch.dtype, block_size: int) -> Work:
    """The tiles of a step, computed once for all layers of one shape and dtype.

    Raises GraphBinding in a captured graph, ValueError if a context exceeds its block table.
    """

    def make() -> Work:
        host = host_rows(x)
        check_tables(host.context, x.table.shape[1], block_size)
        group = shape.num_heads // shape.num_kv_heads
        few = SINGLE_ROWS // group
        singles = [i for i, n in enumerate(host.count) if 0 < n <= few]
        chunks = [i for i, n in enumerate(host.count) if n > few]
        tile = chunk_tile(dtype, shape.head_dim, sum(host.count[i] for i in chunks) * shape.num_heads)
        return Work(
            chunks=put(tiles_of(host, chunks, tile.rows // group), x.table.device) if chunks else None,
            chunk=tile,
            singles=put(tiles_of(host, singles, few), x.table.device) if singles else None,
            single=single_tile(dtype),
        )

    return x.memo.once(("work", shape, dtype), x.table, make)


def check_heads(
    shape: HeadShape, kv: LayerKv, dtype: torch.dtype, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
) -> None:
    """Raises InvalidSetting if the kernels have no program for these heads, this cache or dtype, ValueError if one norm
    weight is missing.
    """
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if shape.head_dim not in HEAD_DIMS or cos_sin.shape[1] != shape.head_dim:
        raise InvalidSetting(
            "ops",
            f"triton: head_dim {shape.head_dim}, of which {cos_sin.shape[1]} are rotated; supported are {HEAD_DIMS}, "
            "wholly rotated",
        )
    if rest or group > SINGLE_ROWS:
        raise InvalidSetting("ops", f"triton: {shape.num_heads} query heads over {shape.num_kv_heads} KV heads")
    if dtype not in DTYPES or kv.layout.dtype != dtype:
        raise InvalidSetting("ops", f"triton: activations of {dtype} over a KV cache of {kv.layout.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normed both or neither; one norm weight is missing")


def attend_prefill(q_TND: Tensor, kv: LayerKv, x: Inputs, scale: float, window: int | None) -> Tensor:
    """Causal attention of every row over its keys in *kv*, which must hold this step's too. [T, N, D], new memory.

    As `attention.paged_attention`: rows of padding give zeros, and what is not a row's key is not read.
    Raises GraphBinding in a captured graph, ValueError if a context exceeds its block table.
    """
    shape = HeadShape(q_TND.shape[1], kv.layout.num_kv_heads, q_TND.shape[2])
    work = work_of(x, shape, q_TND.dtype, kv.layout.block_size)
    out = torch.empty_like(q_TND)
    for tiles, size in ((work.chunks, work.chunk), (work.singles, work.single)):
        if tiles is not None:
            attend_tiles(q_TND, kv.k, values_of(kv), x.table, tiles, out, scale, window, size)
    return out


def attend_ragged(
    qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Ops.attend of any mix of rows: [T, N * D]. Raises as `check_heads` and `attend_prefill`."""
    check_heads(shape, kv, qkv_TX.dtype, cos_sin, q_norm, k_norm)
    q = qk_rope_write(
        qkv_TX, kv.k, values_of(kv), x.positions, x.slots, shape.num_heads, cos_sin, q_norm, k_norm, eps
    )  # fmt: skip
    return attend_prefill(q, kv, x, scale, window).flatten(1)
