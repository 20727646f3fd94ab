"""Mixed steps over scattered blocks: what the tests of attention kernels run, on any device."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Attend
from agentinfer.ops.rope import RopeSpec, cos_sin

EPS, SCALE = 1e-6, 0.11


@frozen(eq=False)
class Case:
    """One step of one layer. The cache is NaN wherever no earlier key was written."""

    shape: HeadShape
    x: Inputs
    layer: LayerKv
    qkv: Tensor
    table: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def attend(self, op: Attend, window: int | None = None) -> tuple[Tensor, LayerKv]:
        """What *op* gives, and the cache it leaves; this case's own cache stays as it was."""
        layer = evolve(self.layer, k=self.layer.k.clone(), v=values_of(self.layer).clone())
        x = evolve(self.x, memo=type(self.x.memo)())
        out = op(self.qkv, layer, x, self.shape, self.table, self.q_norm, self.k_norm, EPS, SCALE, window)
        return out, layer


def case(
    count: list[int],
    context: list[int],
    shape: HeadShape,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    norm: bool = True,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """Row i computes the last *count[i]* of *context[i]* positions; *padding* rows of one query follow."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).to(device, dtype)

    need = [-(-c // block_size) for c in context]
    total = 2 * sum(need) + 3
    layout = kvs.gqa(block_size, shape.num_kv_heads, shape.head_dim, dtype)
    kv = kvs.allocate([layout], total, len(context), max(need) + 1, torch.device(device), math.nan)
    kv.table.fill_(10**9)  # what lies past a row's blocks is garbage
    ids = (torch.randperm(total, generator=gen) + 1).tolist()
    blocks = [[ids.pop() for _ in range(n)] for n in need]
    start = [c - n for c, n in zip(context, count, strict=True)]
    for mine, first in zip(blocks, start, strict=True):
        slots = torch.tensor([mine[at // block_size] * block_size + at % block_size for at in range(first)]).long()
        for plane in (kv.layers[0].k, values_of(kv.layers[0])):
            plane.flatten(0, 1)[slots.to(device)] = draw(first, shape.num_kv_heads, shape.head_dim)
    tokens: Any = [[1] * n for n in count] + [[1]] * padding
    rows = [*range(1, len(count) + 1), *[0] * padding]
    x, kv = by_hand(kv, tokens, [*start, *[0] * padding], [*blocks, *[[0]] * padding], rows)
    weights = [1 + 0.2 * draw(shape.head_dim) if norm else None for _ in range(2)]
    qkv = draw(len(x.ids), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    table = cos_sin(RopeSpec(1e4, shape.head_dim), max(context) + 1, device)
    return Case(shape, x, kv.layers[0], qkv, table, *weights)
