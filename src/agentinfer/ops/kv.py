"""The KV cache: its memory, the linear handle to it, and how much of it fits.

Knows blocks, slots and rows as places, not what they mean: that is the state's business.

Shapes: N blocks + 1 (block 0 is the sink of padding), B tokens a block, H local KV heads, D head dim, M table columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import InvalidSetting, StaleHandle

T = TypeVar("T")
Donated = Annotated[T, "donated"]
"""The function takes this value over and returns the next one: the argument must not be used again."""

Copies = Iterable[tuple[int, int]]
"""(source, target) blocks."""


@frozen
class KvLayout:
    """What one layer keeps of one token on one rank."""

    kind: Literal["gqa", "mla"]
    """gqa: a key and a value a head. mla: one latent with its rope key, a token; no value tensor."""
    block_size: int
    """Tokens a block."""
    num_kv_heads: int
    """Local ones; 1 for mla."""
    head_dim: int
    """Numbers a head; for mla kv_lora_rank + qk_rope_head_dim."""
    dtype: torch.dtype

    @property
    def planes(self) -> int:
        """Tensors a layer: key and value, or the latent alone."""
        return 2 if self.kind == "gqa" else 1


def gqa(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvLayout:
    """Keys and values of *num_kv_heads* local heads."""
    return KvLayout("gqa", block_size, num_kv_heads, head_dim, dtype)


def mla(block_size: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype) -> KvLayout:
    """The latent and its rope key, once a token whatever the heads; replicated over the ranks."""
    return KvLayout("mla", block_size, 1, kv_lora_rank + qk_rope_head_dim, dtype)


@frozen(eq=False)
class LayerKv:
    """The handle of one layer: its tensors of the pool, [N + 1, B, H, D] each. `v` is None for mla."""

    layer: int
    layout: KvLayout
    k: Tensor
    v: Tensor | None


class Lease:
    """Which handle to one pool is the live one. Mutable on purpose; shared by all handles to that pool."""

    __slots__ = ("epoch", "taken_by")

    def __init__(self) -> None:
        self.epoch = 0
        self.taken_by = ""


@frozen(eq=False)
class KvCache:
    """The linear handle to the KV pool and to the block tables on the device.

    A function that writes takes it (`Donated`) and returns the next; the old one then raises StaleHandle.
    """

    layers: tuple[LayerKv, ...]
    table: Tensor
    """[rows + 1, M] int32 block ids of each row; what lies past a row's context may be anything."""
    step: int
    """The step of the plan whose tables it holds; -1: none, so the next plan must bring complete ones."""
    epoch: int
    lease: Lease

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.layers[0].layout.block_size

    def check(self, by: str) -> None:
        """Raises StaleHandle if this handle has been given away. *by*: who wants to use it."""
        if self.epoch != self.lease.epoch:
            raise StaleHandle(f"{by}: this KvCache was given to {self.lease.taken_by}; use the one that it returned")

    def consume(self, by: str) -> KvCache:
        """Take this handle over: it is stale from now on, the one returned is live. Raises StaleHandle."""
        self.check(by)
        self.lease.epoch += 1
        self.lease.taken_by = by
        return KvCache(self.layers, self.table, self.step, self.lease.epoch, self.lease)


def renew(kv: KvCache, by: str) -> KvCache:
    """A live handle to the pool of *kv*, stale or not: for who catches the error of a step that had taken it.

    Tables may be half written, so its `step` is -1. Every other handle is stale.
    """
    kv.lease.epoch += 1
    kv.lease.taken_by = by
    return KvCache(kv.layers, kv.table, -1, kv.lease.epoch, kv.lease)


def holding(kv: KvCache, step: int) -> KvCache:
    """The same live handle, whose tables are those of plan *step*. The pool is not touched."""
    return evolve(kv, step=step)


def allocate(
    layouts: Iterable[KvLayout],
    num_blocks: int,
    num_rows: int,
    max_blocks_per_seq: int,
    device: torch.device,
    fill: float = 0.0,
) -> KvCache:
    """New KV memory of *num_blocks* usable blocks for *num_rows* usable rows; block 0 and row 0 come on top.

    One layout a layer. *fill* is what the memory holds: 0 in production, NaN in tests, so that a read of what nobody
    wrote shows.
    """
    layers: list[LayerKv] = []
    for layer, layout in enumerate(layouts):
        shape = (num_blocks + 1, layout.block_size, layout.num_kv_heads, layout.head_dim)
        # Not views of one tensor: inductor clones what begins inside of a storage before an operator may write to it.
        planes = [_memory(shape, layout.dtype, device, fill) for _ in range(layout.planes)]
        layers.append(LayerKv(layer, layout, planes[0], planes[1] if layout.planes > 1 else None))
    table = torch.zeros((num_rows + 1, max_blocks_per_seq), dtype=torch.int32, device=device)
    return KvCache(tuple(layers), table, step=-1, epoch=0, lease=Lease())


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: float) -> Tensor:
    """A tensor full of *fill*. Zeros on a CPU come from the system page by page, when they are first touched."""
    if fill or device.type != "cpu":
        return torch.full(shape, fill, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def copy_blocks(kv: Donated[KvCache], copies: Copies) -> KvCache:
    """Copy whole blocks in every layer; all sources are read before any target is written. *Donates* kv."""
    kv = kv.consume("copy_blocks")
    pairs = list(copies)
    if pairs:
        index = torch.tensor(pairs, dtype=torch.int64).to(kv.table.device)
        source, target = index[:, 0], index[:, 1]
        for layer in kv.layers:
            for plane in (layer.k, layer.v):
                if plane is not None:
                    plane.index_copy_(0, target, plane.index_select(0, source))
    return kv


def bytes_per_token(layouts: Iterable[KvLayout]) -> int:
    """Bytes of KV that one token takes on one rank, over all layers (one layout a layer)."""
    return sum(x.planes * x.num_kv_heads * x.head_dim * x.dtype.itemsize for x in layouts)


def num_blocks_that_fit(
    *,
    free: int,
    reserve: int,
    utilization: float,
    bytes_per_block: int,
    blocks_per_request: int = 1,
    most: int | None = None,
    setting: str = "kv_utilization",
) -> int:
    """Usable KV blocks for *free* bytes: (free - reserve) * utilization // bytes_per_block, sink block not counted.

    *free* is measured after weights, a worst-case prefill and graph capture. *blocks_per_request* is what one request
    of max_model_len needs.
    *most* caps the result (without a prefix cache: `max_num_seqs * blocks_per_request`).
    Raises InvalidSetting, of *setting*, if not even one such request fits.
    """
    budget = max(0, int((free - reserve) * utilization))
    lower = "max_model_len or reserve_gib" if reserve else "max_model_len"
    blocks = budget // bytes_per_block
    if blocks < max(1, blocks_per_request):
        raise InvalidSetting(
            setting,
            f"{budget:,} bytes are left for KV ({free:,} free - {reserve:,} reserved, times {utilization}): "
            f"{blocks} blocks of {bytes_per_block:,} bytes, but one request of max_model_len needs "
            f"{max(1, blocks_per_request)}. Lower {lower}, or raise {setting}",
        )
    return blocks if most is None else min(blocks, most)
