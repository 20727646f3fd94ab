"""The public configs in configs/: what they say about the models they are of."""

from __future__ import annotations

import json

import pytest

import sources
from agentinfer.models.model import ARCHITECTURES, kv_layout, read_config, weight_sizes
from agentinfer.ops.kv import bytes_per_token

CONFIGS = sorted((sources.ROOT / "configs").glob("*/config.json"))
PARAMETERS = {
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,  # without its layer of multi-token prediction
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
}
KV_BYTES = {"DeepSeek-V2-Lite": 27 * 576 * 2, "DeepSeek-V3": 61 * 576 * 2, "Qwen3-8B": 147_456}


def test_the_configs_that_are_there() -> None:
    """Each folder holds a config.json of one architecture and nothing else: no weights, no tokenizer, no code."""
    assert [path.parent.name for path in CONFIGS] == list(PARAMETERS)
    for path in CONFIGS:
        raw = json.loads(path.read_text("utf-8"))
        assert len(raw["architectures"]) == 1
        assert raw["torch_dtype"] == "bfloat16"
        assert "auto_map" not in raw
        assert [file.name for file in path.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    """A config gives the number of parameters that its model is published with."""
    model = read_config(sources.ROOT / "configs" / name)
    assert weight_sizes(model, 1).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes(name: str, tp: int) -> None:
    """A token's KV takes what was promised; latents are held by every rank, keys and values shared by all."""
    model = read_config(sources.ROOT / "configs" / name)
    share = 1 if "DeepSeek" in name else tp
    assert bytes_per_token(kv_layout(model, tp, 16)) == KV_BYTES[name] // share
    assert KV_BYTES["DeepSeek-V2-Lite"] == 31_104


def test_every_supported_config_is_read() -> None:
    """Those of supported architectures are among the ones whose parameters are checked."""
    known = [path.parent.name for path in CONFIGS if json.loads(path.read_text())["architectures"][0] in ARCHITECTURES]
    assert set(PARAMETERS) <= set(known)
