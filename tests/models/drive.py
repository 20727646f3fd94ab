"""Drives a model's forward by hand: naive block tables over poisoned KV, no scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentinfer.models.model import Model, kv_layout, load_model
from agentinfer.ops.comm import Ranks, alone
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.ops.provide import Ops, reference
from agentinfer.ops.threads import Threads

ROWS, BLOCKS_A_ROW = 6, 16


class Driver:
    """One loaded model with its KV. Rows are 1 .. ROWS, each with blocks of its own, in a scattered order."""

    def __init__(self, model: Model, weights: Any, ranks: Ranks, block_size: int = 4, ops: Ops | None = None) -> None:
        self.model, self.weights, self.ranks = model, weights, ranks
        self.ops = reference() if ops is None else ops
        layouts = kv_layout(model, ranks.tp.size, block_size)
        self.block_size = block_size
        self.kv = allocate(layouts, ROWS * BLOCKS_A_ROW, ROWS, BLOCKS_A_ROW, ranks.device, math.nan)
        self.blocks = {
            row: [1 + (row - 1 + ROWS * i * 7) % (ROWS * BLOCKS_A_ROW) for i in range(BLOCKS_A_ROW)]
            for row in range(1, ROWS + 1)
        }
        assert len({b for blocks in self.blocks.values() for b in blocks}) == ROWS * BLOCKS_A_ROW
        self.computed = dict.fromkeys(self.blocks, 0)

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """One forward pass: row -> its next tokens. Gives the logits of every position, row -> [count, V]."""
        rows = list(work)
        tokens, start = [list(work[row]) for row in rows], [self.computed[row] for row in rows]
        x, kv = by_hand(self.kv, tokens, start, [self.blocks[row] for row in rows], rows, every=True)
        logits, self.kv = self.model.forward(self.model.config, self.weights, self.ops, self.ranks, kv, x)
        for row in rows:
            self.computed[row] += len(work[row])
        parts = logits.split([len(t) for t in tokens])
        return dict(zip(rows, parts, strict=True))

    def share(self, source: int, target: int, blocks: int) -> None:
        """Let row *target* begin with the first *blocks* blocks of row *source*: a prefix hit."""
        self.blocks[target][:blocks] = self.blocks[source][:blocks]
        self.computed[target] = blocks * self.block_size


def load(folder: Path, block_size: int = 4) -> Driver:
    """The model in *folder* on one rank."""
    ranks = alone()
    return Driver(*load_model(folder, None, ranks), ranks, block_size)


def tensor_parallel(
    folder: Path, size: int, work: Sequence[Mapping[int, Sequence[int]]], *, ep: bool = False
) -> list[dict[int, Tensor]]:
    """The logits of each step of *work* with *size* ranks as threads; asserts that all ranks have the same."""

    def rank(group: Any) -> list[dict[int, Tensor]]:
        ranks = Ranks(group, ep=ep, device=torch.device("cpu"))
        driver = Driver(*load_model(folder, None, ranks), ranks)
        return [driver.step(x) for x in work]

    results = Threads.of(size).run(rank)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(mine[row], theirs[row]) for row in mine)
    return results[0]


def worst(got: Tensor, want: Tensor) -> float:
    """The metric of every parity test: the largest difference of any logit at any position."""
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    return float((got - want).abs().max()) if torch.isfinite(got).all() else math.inf
