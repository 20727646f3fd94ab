"""Tiny DeepSeek checkpoints with random weights, written without transformers, and ones in 8 bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentinfer.models.model import read_config
from agentinfer.models.weights import random_tensors

V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "dtype": "float32",
    "eos_token_id": 90,
}
"""With what the checkpoint in the field has: groups, a bias, YaRN, a layer of multi-token prediction."""
V2: Mapping[str, Any] = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def tensors_of(config: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Random weights of the model of that *config*, which becomes *folder*'s."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    model = read_config(folder)
    return random_tensors(model.specs(model.config))


def write(folder: Path, config: Mapping[str, Any] = V3, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A checkpoint in *folder*, of random weights unless *tensors* are given."""
    made = tensors_of(config, folder)
    save_file(
        {k: x.contiguous() for k, x in (made if tensors is None else tensors).items()}, folder / "model.safetensors"
    )
    return folder


def in_8_bits(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """(stored, scales): block by block, as they are to be multiplied. Written down plainly, to be compared with."""
    rows, columns = weight.shape
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def out_of_8_bits(stored: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """The float32 that the two stand for."""
    out = stored.to(torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            out[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scales[i, j]
    return out
