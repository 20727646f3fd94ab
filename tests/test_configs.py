"""The public configs in configs/: what they say about the models they are of."""

from __future__ import annotations

import json

import pytest

import sources
from agentinfer.models.model import ARCHITECTURES, read_config, weight_sizes

CONFIGS = sorted((sources.ROOT / "configs").glob("*/config.json"))
PARAMETERS = {"Qwen3-8B": 8_190_735_360, "Qwen3-0.6B": 596_049_920}


def test_the_configs_that_are_there() -> None:
    """Each folder holds a config.json of one architecture and nothing else: no weights, no tokenizer, no code."""
    assert [path.parent.name for path in CONFIGS] == ["DeepSeek-V2-Lite", "Qwen3-0.6B", "Qwen3-8B"]
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


def test_every_supported_config_is_read() -> None:
    """Those of supported architectures are among the ones whose parameters are checked."""
    known = [path.parent.name for path in CONFIGS if json.loads(path.read_text())["architectures"][0] in ARCHITECTURES]
    assert set(PARAMETERS) <= set(known)
