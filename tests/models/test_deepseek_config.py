"""config.json of DeepSeek and Qwen3-MoE, read strictly: what is used arrives, what would be ignored is refused."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import deepseeks
import sources
from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.deepseek_config import DeepseekConfig
from agentinfer.models.model import kv_layout, read_config, weight_sizes
from agentinfer.models.qwen3_moe import Qwen3MoeConfig
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.provide import LayerShape
from agentinfer.ops.rope import inv_freq, magnitude, yarn_bounds


class Gone(Enum):
    """Stands where a field is taken out; its name does not change from process to process, as an address would."""

    GONE = "gone"


GONE = Gone.GONE
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip


def read(folder: Path, base: Any, **change: Any) -> Any:
    raw = {k: v for k, v in {**base, **change}.items() if v is not GONE}
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder).config


def public(name: str) -> DeepseekConfig:
    config = read_config(sources.ROOT / "configs" / name).config
    assert isinstance(config, DeepseekConfig)
    return config


def test_v2_lite() -> None:
    """DeepSeek-V2-Lite's public config says what is known of it."""
    c = public("DeepSeek-V2-Lite")
    assert (c.num_heads, c.q_lora_rank, c.kv_lora_rank, c.nope_dim, c.rope_dim, c.value_dim) == (
        16,
        None,
        512,
        128,
        64,
        128,
    )
    assert c.experts.routing == Routing(6, "softmax", normalise=False, scale=1.0)
    assert (c.experts.num_experts, c.experts.width, c.experts.shared_width, c.experts.biased) == (64, 1408, 2816, False)
    assert c.experts.layers == (False,) + (True,) * 26
    assert (c.interleaved, c.mtp_layers, c.max_positions, c.eos_ids) == (True, 0, 163840, (100001,))
    assert c.scale == pytest.approx(0.11472138679292611, rel=1e-12)
    assert magnitude(c.rope) == 1.0


def test_v3() -> None:
    """DeepSeek-V3's public config says what is known of it, its layer of multi-token prediction included."""
    c = public("DeepSeek-V3")
    assert (c.num_heads, c.q_lora_rank, c.num_layers, c.mtp_layers) == (128, 1536, 61, 1)
    assert c.experts.routing == Routing(
        8, "sigmoid", normalise=True, scale=2.5, groups=8, kept_groups=4, group_score="top2"
    )
    assert (c.experts.num_experts, c.experts.width, c.experts.shared_width, c.experts.biased) == (256, 2048, 2048, True)
    assert c.experts.layers == (False,) * 3 + (True,) * 58
    assert c.scale == pytest.approx(0.1352337788608801, rel=1e-12)
    assert yarn_bounds(c.rope) == (10, 23)
    assert inv_freq(c.rope)[[0, 11, 16, 24, 31]].tolist() == pytest.approx(
        [1.0, 0.0390069266, 0.0055, 2.5e-05, 3.33380358e-06], rel=1e-6
    )


def test_both_mscales(tmp_path: Path) -> None:
    """The softmax scale has the square of one mscale, cos and sin the ratio of both; without YaRN neither has any."""
    rope = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
    big = {"max_position_embeddings": 163840, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    c = read(tmp_path, deepseeks.V3, **big, rope_scaling=rope)
    assert c.scale == pytest.approx(0.11472138679292611, rel=1e-12)
    assert magnitude(c.rope) == pytest.approx(1.0857263992561355, rel=1e-12)
    c = read(tmp_path, deepseeks.V3, **big, rope_scaling={**rope, "mscale": 0.707, "mscale_all_dim": 0.707})
    assert magnitude(c.rope) == 1.0
    c = read(tmp_path, deepseeks.V3, **big, rope_scaling=None)
    assert (c.scale, magnitude(c.rope)) == (192**-0.5, 1.0)
    new = {
        "rope_theta": GONE,
        "rope_scaling": GONE,
        "rope_parameters": {**rope, "rope_type": "yarn", "rope_theta": 1e4},
    }
    assert read(tmp_path, deepseeks.V3, **big, **new).scale == pytest.approx(0.11472138679292611, rel=1e-12)


def test_shapes_of_ranks() -> None:
    """Ranks share heads and the width of experts, and each has all latents."""
    model = read_config(sources.ROOT / "configs" / "DeepSeek-V2-Lite")
    assert model.heads(model.config, 4) == LayerShape(
        HeadShape(4, 1, 576), LatentShape(4, 128, 64, 512, 128), ExpertShape(64, 6, 352)
    )
    assert model.heads(model.config, 16).experts == ExpertShape(64, 6, 88)
    one, four = (weight_sizes(model, tp) for tp in (1, 4))
    assert one.num_parameters == four.num_parameters
    assert 0.24 < four.rank_bytes / one.rank_bytes < 0.27
    with pytest.raises(InvalidSetting, match=r"tp: 3 ranks can not share 16 heads; these can: 1, 2, 4, 8"):
        kv_layout(model, 3, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"n_shared_experts": GONE}, "n_shared_experts: missing"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group: 3 groups"),
        ({"n_group": 8}, "n_group: 8 groups .* 2 or more"),
        ({"n_group": GONE}, "n_group: missing"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1}, "topk_group: 1 groups of 2 experts are less than num_experts_per_tok 3"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy'; .*'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ({"routed_scaling_factor": GONE}, "routed_scaling_factor: missing"),
        ({"first_k_dense_replace": GONE}, "first_k_dense_replace: missing"),
        ({"q_lora_rank": GONE}, "q_lora_rank: missing"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: must be even"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: .*'gptq'"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "'magic'"),
    ],
    ids=str,
)
def test_v3_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """What is missing, contradictory or not supported in DeepSeek-V3 is an error that names file and field."""
    with pytest.raises(CheckpointError, match=f"config.json: .*{named}"):
        read(tmp_path, deepseeks.V3, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group"),
        ({"topk_method": "group_limited_greedy", "topk_group": None}, "topk_group"),
    ],
    ids=str,
)
def test_v2_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """So it is for DeepSeek-V2, whose router has other rules."""
    with pytest.raises(CheckpointError, match=f"config.json: .*{named}"):
        read(tmp_path, deepseeks.V2, **change)


def test_names_of_newer_files(tmp_path: Path) -> None:
    """Files without topk_method and scoring_func mean their architecture's; both names of prediction layers count."""
    c = read(tmp_path, deepseeks.V3)
    assert c.experts.routing.scoring == "sigmoid"
    assert c == read(tmp_path, deepseeks.V3, topk_method="noaux_tc", scoring_func="sigmoid", num_key_value_heads=4)
    assert c == read(tmp_path, deepseeks.V3, norm_topk_prob=GONE)
    assert c == read(tmp_path, deepseeks.V3, num_nextn_predict_layers=GONE, num_mtp_layers=1)
    assert read(tmp_path, deepseeks.V3, num_nextn_predict_layers=GONE).mtp_layers == 0
    c = read(tmp_path, deepseeks.V2, topk_method=GONE, n_group=None, topk_group=None)
    assert c.experts.routing == Routing(3, "softmax", normalise=False)


def test_qwen3_moe(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's fields arrive, and give the number of parameters that it is published with."""
    c = read(tmp_path, QWEN3_MOE)
    assert isinstance(c, Qwen3MoeConfig)
    assert c.experts.routing == Routing(8, "softmax", normalise=True)
    assert c.experts.layers == (True,) * 48
    assert (c.dense.qk_norm, c.dense.head_dim, c.experts.shared_width, c.experts.biased) == (True, 128, 0, False)
    assert weight_sizes(read_config(tmp_path), 1).num_parameters == 30_532_122_624
    assert c == read(tmp_path, QWEN3_MOE, num_experts=GONE, num_local_experts=128)
    layers = read(tmp_path, QWEN3_MOE, decoder_sparse_step=3, mlp_only_layers=[2], num_hidden_layers=7).experts.layers
    assert layers == (False, False, False, False, False, True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlp_only_layers": [48]}, "mlp_only_layers"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_experts": GONE}, "num_local_experts: missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ],
    ids=str,
)
def test_qwen3_moe_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """What is missing or contradictory in Qwen3-MoE is an error that names file and field."""
    with pytest.raises(CheckpointError, match=f"config.json: .*{named}"):
        read(tmp_path, QWEN3_MOE, **change)
