"""Steps of one row, for tests of the persistent kernel: a model with the KV of earlier positions, once in bfloat16 and
once, the same numbers, in float32 for the reference ops.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, fields, frozen, has
from torch import Tensor

from agentinfer.models import dense
from agentinfer.models.model import kv_layout, random_model, read_config
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import KvCache, allocate, renew
from agentinfer.ops.provide import reference
from tiny import CONFIG

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1100, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
MOST_KEYS = 3200


def cast(weights: Any, dtype: torch.dtype) -> Any:
    """The tree with all but the rope table in *dtype*."""
    if isinstance(weights, Tensor):
        return weights.to(dtype)
    if isinstance(weights, tuple):
        return tuple(cast(x, dtype) for x in weights)
    if has(type(weights)):
        changes = {f.name: cast(getattr(weights, f.name), dtype) for f in fields(type(weights)) if f.name != "cos_sin"}
        return evolve(weights, **changes)
    return weights


@frozen(eq=False)
class Case:
    config: Any
    weights: Any
    truth: Any
    kv: KvCache
    true_kv: KvCache

    @property
    def device(self) -> torch.device:
        return self.kv.table.device


def case(folder: Path, device: torch.device, block_size: int = 16, **config: object) -> Case:
    """A model of the shape SMALL but for *config*, with random keys and values for MOST_KEYS positions."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **SMALL, **config}))
    model, weights = random_model(read_config(folder), torch.float32, alone(device))
    weights = cast(weights, torch.bfloat16)
    blocks = MOST_KEYS // block_size
    kv, true_kv = (
        allocate(kv_layout(model, 1, block_size, dtype), blocks, 1, blocks, device)
        for dtype in (torch.bfloat16, torch.float32)
    )
    noise = torch.Generator(device).manual_seed(3)
    for layer in kv.layers:
        for plane in (layer.k, layer.v):
            assert plane is not None
            plane.copy_(torch.randn(plane.shape, generator=noise, device=device))
    made = Case(model.config, weights, cast(weights, torch.float32), kv, true_kv)
    copy_keys(made)
    return made


def copy_keys(x: Case) -> None:
    """Give the reference the keys and values that the kernel has."""
    for mine, true in zip(x.kv.layers, x.true_kv.layers, strict=True):
        assert mine.v is not None
        assert true.v is not None
        true.k.copy_(mine.k)
        true.v.copy_(mine.v)


def inputs(kv: KvCache, token: int, position: int) -> tuple[Inputs, KvCache]:
    """One row whose blocks lie in no order."""
    blocks = list(range(1, len(kv.layers[0].k)))
    random.Random(1).shuffle(blocks)
    return by_hand(renew(kv, "test"), [[token]], [position], [blocks[: 1 + position // kv.block_size]])


def wanted(x: Case, token: int, position: int) -> Tensor:
    """The reference's logits."""
    at, kv = inputs(x.true_kv, token, position)
    return dense.forward(x.config, x.truth, reference(), alone(x.device), kv, at)[0]


def check(x: Case, got: Tensor, token: int, position: int, limit: float = 2e-2) -> float:
    """The error of logits over their norm, which is below *limit*; all keys and values are the reference's, as far as
    rounding of what they follow from allows, and from now on the reference has those of the kernel.
    """
    want = wanted(x, token, position)
    error = float((got - want).norm() / want.norm())
    assert error < limit, error
    for mine, true in zip(x.kv.layers, x.true_kv.layers, strict=True):
        assert mine.v is not None
        assert true.v is not None
        for plane, other in ((mine.k, true.k), (mine.v, true.v)):
            assert float((plane.float() - other).abs().max()) < 0.05 * float(other.abs().max())
    copy_keys(x)
    return error
