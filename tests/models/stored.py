"""A small Qwen3-like checkpoint with every kind of weight, written by hand so that tests can spoil it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentinfer.models import dense
from agentinfer.models.config import read_dense
from agentinfer.models.model import load_model
from agentinfer.models.weights import random_tensors, tree_leaves
from agentinfer.ops.comm import alone

CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 13,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 21,
}
TENSORS: Mapping[str, Tensor] = random_tensors(dense.specs(read_dense(CONFIG, Path("nowhere"))))
NAMES = tuple(TENSORS)


def configure(folder: Path, **change: Any) -> Path:
    """*folder* with CONFIG as its config.json, some fields changed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    return folder


def store(folder: Path, tensors: Mapping[str, Tensor] | None = None, *, configured: bool = False) -> Path:
    """*folder* with these tensors (TENSORS unless given) in one model.safetensors, and CONFIG unless *configured*."""
    if not configured:
        configure(folder)
    save_file(dict(TENSORS if tensors is None else tensors), folder / "model.safetensors")
    return folder


def shards(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], index: Mapping[str, Any] | None = None) -> Path:
    """*folder* with a file for each of *parts*, and with the index if given."""
    configure(folder)
    for name, tensors in parts.items():
        save_file(dict(tensors), folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path) -> Any:
    """The packed weights in *folder*, on one rank."""
    return load_model(folder, None, alone())[1]


def equal(one: Any, two: Any) -> bool:
    """Whether two trees hold the same tensors."""
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
