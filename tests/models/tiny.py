"""Tiny random models saved by transformers, and what transformers makes of them: the oracle of the parity tests."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

VOCAB, LENGTH = 96, 26
TOKENS = [int(t) for t in torch.randint(0, 90, (LENGTH,), generator=torch.Generator().manual_seed(1))]
OTHERS = [[(t * 7 + 3 * n) % 90 for t in TOKENS[:n]] for n in (1, 9, 24, 17)]

BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW: Mapping[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1e4,
}  # fmt: skip
LINEAR: Mapping[str, Any] = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
VISION: Mapping[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}
VISION_25: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 32,
}
MROPE: Mapping[str, Any] = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e6}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 2,
    "moe_intermediate_size": 10, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-2,
}  # fmt: skip
"""An eps that the norms of latents must not have."""
DEEPSEEK_YARN: Mapping[str, Any] = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}
GROUPS: Mapping[str, Any] = {"n_group": 4, "topk_group": 2}
V2: Mapping[str, Any] = {**LATENT, "topk_method": "greedy", "rope_parameters": DEEPSEEK_YARN}
V3: Mapping[str, Any] = {
    **LATENT, **GROUPS, "q_lora_rank": 24, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "rope_parameters": DEEPSEEK_YARN,
}  # fmt: skip
MOE: Mapping[str, Any] = {
    "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 10, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "num_hidden_layers": 3, "mlp_only_layers": [1],
}  # fmt: skip

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {**WINDOW}),
    "qwen2-odd": ("Qwen2", {"vocab_size": 97, "intermediate_size": 81, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-bias": ("Qwen3", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", {"head_dim": 16, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3-odd": ("Qwen3", {"head_dim": 16, "attention_bias": True, "vocab_size": 97, "intermediate_size": 81}),
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "intermediate_size": 81}),
    "qwen2-vl": ("Qwen2VL", {"text": {"rope_parameters": MROPE}, "vision": VISION}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"text": {"rope_parameters": MROPE, "rms_norm_eps": 1e-6}, "vision": VISION_25}),
    "deepseek-v2": ("DeepseekV2", V2),
    "deepseek-v2-lora": ("DeepseekV2", {**V2, "q_lora_rank": 24, "tie_word_embeddings": True}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**V2, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek-v3": ("DeepseekV3", V3),
    "deepseek-v3-odd": (
        "DeepseekV3",
        {**V3, "q_lora_rank": None, "vocab_size": 97, "moe_intermediate_size": 11, "norm_topk_prob": False},
    ),
    "deepseek-v3-halves": ("DeepseekV3", {**V3, "rope_interleave": False, "first_k_dense_replace": 0}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe-raw": ("Qwen3Moe", {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
}
TEXT = tuple(name for name in CASES if "vl" not in name)


@frozen(eq=False)
class Tiny:
    """A saved model and its transformers original."""

    folder: Path
    module: Any

    def logits(self, tokens: list[int]) -> Tensor:
        """What transformers computes for the whole sequence, eager attention, float32. [len(tokens), V]."""
        with torch.no_grad():
            return self.module(input_ids=torch.tensor([tokens])).logits[0]


@cache
def make(name: str, root: Path) -> Tiny:
    """The model of that case, saved under *root*."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    family, change = CASES[name]
    if "text" in change:
        text = {**BASE, **change["text"]}
        ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
        config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=dict(change["vision"]), **ids)
        kind = getattr(transformers, f"{family}ForConditionalGeneration")
    else:
        config = getattr(transformers, f"{family}Config")(**{**BASE, **change})
        kind = getattr(transformers, f"{family}ForCausalLM")
    config._attn_implementation = config._experts_implementation = "eager"
    module = kind(config).eval()
    randomise(module)
    folder = root / name
    with contextlib.redirect_stderr(io.StringIO()):
        module.save_pretrained(folder)
    return Tiny(folder, module)


def randomise(module: Any) -> None:
    """Weights that make every fault visible: matrices 0.15 randn, norms 1 + 0.2 randn, biases 0.1 randn."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in module.named_parameters():
            noise = torch.randn(x.shape, generator=draw)
            x.copy_(
                1 + 0.2 * noise if "norm" in name and x.dim() == 1 else 0.1 * noise if "bias" in name else 0.15 * noise
            )
        for name, x in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                x.copy_(0.3 * torch.randn(x.shape, generator=draw) - 0.6)  # so that most scores become negative
