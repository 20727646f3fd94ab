"""memory_plan: what would fit where, without the devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentinfer.errors import InvalidSetting
from agentinfer.memory import memory_plan
from tiny import write_tiny


@pytest.mark.parametrize("memory_gib", [0, -1, float("nan"), 1e300])
def test_a_memory_plan_names_its_own_parameter(memory_gib: float) -> None:
    """A memory that no device has is refused as memory_gib, before the folder is looked at."""
    with pytest.raises(InvalidSetting) as refusal:
        memory_plan(Path("nowhere"), memory_gib=memory_gib)
    assert refusal.value.field == "memory_gib"


def test_kv_that_is_asked_for_takes_the_rules_place(tmp_path: Path) -> None:
    """With kv_gib that much is for KV, as far as the memory goes; without, the share of what is left."""
    folder = write_tiny(tmp_path)
    rule = memory_plan(folder, memory_gib=1, kv_utilization=0.5, reserve_gib=0.5)
    asked = memory_plan(folder, memory_gib=1, kv_gib=0.25)
    assert rule.kv_memory == (2**29 - rule.weights) // 2
    assert (asked.kv_memory, asked.num_blocks) == (2**28, 2**28 // asked.kv_per_block)
    assert memory_plan(folder, memory_gib=1, kv_gib=8).kv_memory == 2**30 - asked.weights


def test_weights_of_eight_bits_are_known(tmp_path: Path) -> None:
    """A checkpoint whose weights are quantized is told apart, and planned in the dtype that holds them."""
    folder = write_tiny(tmp_path)
    assert not memory_plan(folder, memory_gib=1).quantized
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    plan = memory_plan(folder, memory_gib=1)
    assert (plan.quantized, plan.dtype, plan.weights) == (True, "bfloat16", 2 * plan.num_parameters)
