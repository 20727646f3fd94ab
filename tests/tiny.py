"""A tiny Qwen3 checkpoint with random weights, written without transformers, for tests above the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentinfer.models.model import read_config
from agentinfer.models.weights import random_tensors

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": 90,
}


def write_tiny(folder: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: object) -> Path:
    """A checkpoint in *folder*. *change* may edit the tensors before they are saved; *config* overrides fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    model = read_config(folder)
    tensors = random_tensors(model.specs(model.config))
    if change is not None:
        change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
