"""config.json -> DeepseekConfig: DeepSeek-V2 and V3, every field that is used checked.

Knows the field names of Hugging Face's config files, old and new. Must not know tensors, files of weights or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from agentinfer.errors import InvalidSetting
from agentinfer.models.config import CONFIG, MOST_LAYERS, architecture_of, dtype_of, eos_of, refuse_unsupported
from agentinfer.models.expert_config import ExpertConfig, deepseek_experts
from agentinfer.models.fields import Fields
from agentinfer.models.rope_fields import MOST_POSITIONS, RopeDefaults, longest, read_rope
from agentinfer.ops.rope import RopeSpec, latent_softmax_scale


@frozen
class DeepseekConfig:
    """A decoder with latent attention and experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers."""
    num_layers: int
    """Those that predict the next token."""
    mtp_layers: int
    """Layers behind them that a checkpoint may hold, for tokens after the next (multi-token prediction). Not used."""
    num_heads: int
    q_lora_rank: int | None
    """Width of a query's latent; None: queries have none."""
    kv_lora_rank: int
    nope_dim: int
    """Numbers of a query or key head that are not rotated."""
    rope_dim: int
    """Those that are."""
    value_dim: int
    interleaved: bool
    """Rope turns pairs of neighbours, as the rows of the checkpoint lie."""
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    experts: ExpertConfig
    tied: bool
    dtype: torch.dtype | None
    eos_ids: tuple[int, ...]

    @property
    def scale(self) -> float:
        """What the attention scores are multiplied by."""
        return latent_softmax_scale(self.rope, self.nope_dim + self.rope_dim)


def read_deepseek(raw: Mapping[str, Any], folder: Path) -> DeepseekConfig:
    """The config of DeepSeek-V2 or V3 from the JSON object *raw* of *folder*'s config.json.

    Raises CheckpointError naming file and field.
    """
    where = str(folder / CONFIG)
    f = Fields(raw, where)
    architecture = architecture_of(raw, where)
    v3 = architecture.startswith("DeepseekV3")
    refuse_unsupported(f, f)
    num_heads, num_layers = f.integer("num_attention_heads"), f.integer("num_hidden_layers", most=MOST_LAYERS)
    interleaved = f.flag("rope_interleave", default=True)
    _refuse(f, num_heads, v3=v3, interleaved=interleaved)
    rope_dim, max_positions = _rope_dim(f), f.integer("max_position_embeddings", most=MOST_POSITIONS)
    rope = read_rope(f, RopeDefaults(1e4, rope_dim, max_positions))
    vocab_size = f.integer("vocab_size")
    return DeepseekConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=f.integer("hidden_size"),
        intermediate_size=f.integer("intermediate_size"),
        num_layers=num_layers,
        mtp_layers=f.integer("num_nextn_predict_layers", f.integer("num_mtp_layers", 0, least=0), least=0),
        num_heads=num_heads,
        q_lora_rank=_q_lora_rank(f),
        kv_lora_rank=f.integer("kv_lora_rank"),
        nope_dim=f.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=f.integer("v_head_dim"),
        interleaved=interleaved,
        max_positions=longest(rope, max_positions),
        norm_eps=f.number("rms_norm_eps"),
        rope=rope,
        experts=deepseek_experts(f, num_layers, v3=v3),
        tied=f.flag("tie_word_embeddings"),
        dtype=dtype_of(f, f),
        eos_ids=eos_of(folder, f, f, vocab_size),
    )


def check_tp(config: DeepseekConfig, tp: int) -> None:
    """Whether *tp* ranks can share the heads; each caches all latents. Raises InvalidSetting naming the tp that can."""
    if tp < 1 or config.num_heads % tp:
        works = ", ".join(str(t) for t in range(1, 9) if config.num_heads % t == 0)
        raise InvalidSetting("tp", f"{tp} ranks can not share {config.num_heads} heads; these can: {works}")


def _refuse(f: Fields, num_heads: int, *, v3: bool, interleaved: bool) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if f.flag(name):
            raise f.fault(name, "true; biases are not supported in DeepSeek models")
    if f.integer("num_key_value_heads", num_heads) != num_heads:
        heads = f"num_attention_heads {num_heads}"
        raise f.fault("num_key_value_heads", f"{f.raw['num_key_value_heads']}; latent attention has {heads} of them")
    if not v3 and not interleaved:
        raise f.fault("rope_interleave", "false; DeepSeek-V2 has interleaved pairs")


def _q_lora_rank(f: Fields) -> int | None:
    """Null means that queries have no latent. A file without the field is not guessed at."""
    if "q_lora_rank" in f.raw and f.raw["q_lora_rank"] is None:
        return None
    return f.integer("q_lora_rank")


def _rope_dim(f: Fields) -> int:
    rope_dim = f.integer("qk_rope_head_dim", least=2)
    if rope_dim % 2:
        raise f.fault("qk_rope_head_dim", f"must be even for rotary embedding, not {rope_dim}")
    return rope_dim
