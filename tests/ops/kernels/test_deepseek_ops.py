"""Whole tiny DeepSeeks with our kernels' Ops, in Triton's interpreter, against the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseeks
from agentinfer.models.model import Model, kv_layout, load_model
from agentinfer.ops import provide
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kernels.tiles import GemvTile
from agentinfer.ops.kv import allocate
from agentinfer.ops.provide import Ops
from agentinfer.ops.triton_ops import triton_ops

SIZES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 3, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
STEPS: Sequence[Mapping[int, Sequence[int]]] = (
    {0: range(7), 1: range(20, 21), 2: range(30, 47)},  # chunks and a single query
    {1: [5]},  # one row
    {0: [1], 1: [2], 2: [3]},  # three rows
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays by the program, so tiles are large here."""
    from agentinfer.ops.kernels import gemv

    monkeypatch.setattr(gemv, "gemv_tile", lambda n, k, gated: GemvTile(32, 64, 1))


class Run:
    """A model over poisoned KV of its own: row i + 1 has every third block from i + 1 on."""

    def __init__(self, ops: Ops, model: Model, weights: Any) -> None:
        self.ops, self.model, self.weights = ops, model, weights
        self.kv = allocate(kv_layout(model, 1, 16), 12, 3, 4, torch.device("cpu"), math.nan)
        self.length = [0, 0, 0]

    def step(self, work: Mapping[int, Sequence[int]]) -> Tensor:
        """Row -> its next tokens; the logits of the last position of each."""
        x, kv = by_hand(
            self.kv, [list(tokens) for tokens in work.values()], [self.length[row] for row in work],
            [[1 + row + 3 * i for i in range(4)] for row in work], [row + 1 for row in work],
        )  # fmt: skip
        logits, self.kv = self.model.forward(self.model.config, self.weights, self.ops, alone(), kv, x)
        for row, tokens in work.items():
            self.length[row] += len(tokens)
        return logits


@pytest.mark.parametrize("config", [deepseeks.V2, deepseeks.V3], ids=["v2", "v3"])
def test_models_are_the_reference(config: Mapping[str, Any], tmp_path: Path) -> None:
    """In float32, chunks, one row and several rows give the reference's logits, step after step, with and without a
    latent of the query.
    """
    folder = deepseeks.write(tmp_path, {**config, **SIZES, "first_k_dense_replace": 1})
    model, weights = load_model(folder, None, alone())
    plain, ours = (Run(ops, model, weights) for ops in (provide.reference(), triton_ops(torch.device("cpu"))))
    for work in STEPS:
        torch.testing.assert_close(ours.step(work), plain.step(work), rtol=1e-4, atol=1e-4)


def test_half_precision(tmp_path: Path) -> None:
    """In float16, split products and experts' parts end near the float32 reference."""
    folder = deepseeks.write(tmp_path, {**deepseeks.V2, **SIZES})
    wide, narrow = (load_model(folder, dtype, alone()) for dtype in (torch.float32, torch.float16))
    plain = Run(provide.reference(), *wide)
    ours = Run(triton_ops(torch.device("cpu"), gemm_rows=64), *narrow)
    for work in STEPS:
        torch.testing.assert_close(ours.step(work), plain.step(work), rtol=5e-2, atol=5e-2)
