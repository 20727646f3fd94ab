"""Latent attention by our Triton kernels: steps of one query a row absorbed, rows of several by made keys and values.

============================ =========================================================================================
all rows have one query      `attend_latent` alone; asks the host nothing, so a graph can capture it
otherwise, rows of one       the same kernels, over the positions of those rows
otherwise, rows of several   all latents of a group of rows are gathered, one product makes their keys and values
============================ =========================================================================================

Shapes: T positions, R rows, N heads, U, P, L, C, O as in `mla`.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.errors import InvalidSetting
from agentinfer.ops.inputs import Inputs, check_tables, host_rows, put, ranges
from agentinfer.ops.kernels.attend_latent import attend_latent
from agentinfer.ops.kernels.attend_made import QUERIES, attend_made
from agentinfer.ops.kernels.latent_write import latent_write
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.mla import LatentShape, latents_of
from agentinfer.state.ids import I32

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KEYS = 1 << 15
"""Keys whose keys and values are made at once, unless one row has more: bounds their memory."""


@frozen(eq=False)
class Group:
    """Rows of several queries whose keys are made together."""

    slots: Tensor
    """[J] int64 of all keys of the rows, one row after the other."""
    work: Tensor
    """[tiles, 4] int32: see `attend_made`."""


@frozen(eq=False)
class Single:
    """The rows of one query."""

    at: Tensor
    """[r] int64 their flat positions."""
    rows: Tensor
    context: Tensor
    slots: Tensor


@frozen(eq=False)
class LatentWork:
    """A step with rows of several queries. Made once for all layers."""

    single: Single | None
    groups: tuple[Group, ...]
    padded: bool
    """There is a row of padding: nobody writes its output."""


def unsupported(shape: LatentShape) -> str | None:
    """Why the kernels have no program for these heads; None if they have."""
    sizes = {
        "qk_nope_head_dim": (shape.nope_dim, 256), "qk_rope_head_dim": (shape.rope_dim, 128),
        "kv_lora_rank": (shape.latent_dim, 512), "v_head_dim": (shape.value_dim, 256),
    }  # fmt: skip
    for name, (size, most) in sizes.items():
        if not 16 <= size <= most or size & (size - 1):
            return f"{name} {size} is no power of two from 16 to {most}"
    return None


def work_of(x: Inputs, block_size: int) -> LatentWork:
    """How the rows of a step are attended. Raises GraphBinding in a captured graph, ValueError if a context exceeds its
    block table.
    """

    def make() -> LatentWork:
        host = host_rows(x)
        check_tables(host.context, x.table.shape[1], block_size)
        first = np.cumsum((0, *host.count))
        real = [i for i, n in enumerate(host.count) if n and host.rows[i] and host.context[i]]
        ones = [i for i in real if host.count[i] == 1]
        many = [i for i in real if host.count[i] > 1]
        groups: list[list[int]] = []
        keys = 0
        for i in many:
            keys += host.context[i]
            if not groups or keys > MOST_KEYS:
                groups.append([])
                keys = host.context[i]
            groups[-1].append(i)
        device = x.table.device
        single = None
        if ones:
            which = put(np.array(ones, np.int64), device)
            at = put(first[ones].astype(np.int64), device)
            single = Single(
                at, *(v.index_select(0, i) for v, i in ((x.rows, which), (x.context, which), (x.slots, at)))
            )
        return LatentWork(
            single, tuple(_group(x, rows, first, block_size) for rows in groups),
            padded=sum(host.count[i] for i in real) < len(x.ids),
        )  # fmt: skip

    return x.memo.once(("latent work", block_size), x.table, make)


def _group(x: Inputs, rows: list[int], first: np.ndarray, block_size: int) -> Group:
    host = host_rows(x)
    count, context = (np.array([v[i] for i in rows], np.int64) for v in (host.count, host.context))
    key = ranges(np.zeros_like(context), context)
    which = np.repeat(np.array([host.rows[i] for i in rows], np.int64), context)
    places = put(which * x.table.shape[1] + key // block_size, x.table.device)
    block = x.table.reshape(-1).index_select(0, places).to(torch.int64)
    slots = block * block_size + put(key % block_size, x.table.device)
    return Group(slots, put(_tiles(first[rows], count, context), x.table.device))


def _tiles(first: np.ndarray, count: np.ndarray, context: np.ndarray) -> I32:
    """[tiles, 4] as `attend_made` reads them, those with most keys first."""
    start = np.cumsum(context) - context
    cuts = -(-count // QUERIES)
    row = np.repeat(np.arange(len(count)), cuts)
    at = ranges(np.zeros_like(cuts), cuts) * QUERIES
    size = np.minimum(QUERIES, count[row] - at)
    position = context[row] - count[row] + at
    tiles = np.stack((first[row] + at, size, position, start[row]), axis=1)
    return tiles[np.argsort(-(position + size), kind="stable")].astype(np.int32)


def attend(
    q_TX: Tensor, latent_TC: Tensor, kv: LayerKv, x: Inputs, shape: LatentShape, cos_sin: Tensor, kv_norm_L: Tensor,
    kv_b: Tensor, scale: float, latent_eps: float, *, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Ops.attend_latent by our kernels. Raises InvalidSetting for heads, cache or dtype that they have no program for,
    ValueError for a cache of keys and values, GraphBinding for rows of several queries in a captured graph.
    """
    latents_of(kv)  # raises
    why = unsupported(shape)
    if why is None and (q_TX.dtype not in DTYPES or kv.layout.dtype != q_TX.dtype):
        why = f"activations of {q_TX.dtype} over a latent cache of {kv.layout.dtype}"
    if why is not None:
        raise InvalidSetting("ops", f"triton: {why}")
    if x.max_query == 1 and len(x.ids) == len(x.rows):
        return attend_latent(
            q_TX, latent_TC, kv.k, x.table, x.rows, x.context, x.slots, shape.nope_dim, cos_sin, kv_norm_L, kv_b,
            latent_eps, scale, interleaved=shape.interleaved, pdl=pdl,
        )  # fmt: skip
    work = work_of(x, kv.layout.block_size)
    make = torch.zeros if work.padded else torch.empty
    out = make((len(q_TX), shape.num_heads * shape.value_dim), dtype=q_TX.dtype, device=q_TX.device)
    latent_write(
        latent_TC, kv_norm_L, cos_sin, x.positions, x.slots, kv.k, latent_eps, interleaved=shape.interleaved
    )  # fmt: skip
    for group in work.groups:
        latents = latents_of(kv).view(-1, shape.cached_dim).index_select(0, group.slots)
        made = functional.linear(latents[:, : shape.latent_dim], kv_b.flatten(0, 1))
        attend_made(
            q_TX, made, latents, cos_sin, group.work, out, shape.nope_dim, scale, interleaved=shape.interleaved
        )  # fmt: skip
    if work.single is not None:
        some = work.single
        alone = attend_latent(
            q_TX.index_select(0, some.at), latent_TC.index_select(0, some.at), kv.k, x.table, some.rows, some.context,
            some.slots, shape.nope_dim, cos_sin, kv_norm_L, kv_b, latent_eps, scale, interleaved=shape.interleaved,
        )  # fmt: skip
        out.index_copy_(0, some.at, alone)
    return out
