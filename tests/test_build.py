"""Settings: what can not work is refused where it is set, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentinfer.build import Settings, memory_plan
from agentinfer.errors import InvalidSetting


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dtype", ("int4", 5)),
        ("device", (None, 0)),
        ("policy", (None, "fair", 5)),
        ("block_size", (0, None, "4", 2**31)),
        ("num_blocks", (0, 1.5, 10**20)),
        ("max_model_len", (0, "9", 2**31)),
        ("max_num_seqs", (0, None, True, 10**20)),
        ("max_num_batched_tokens", (0, None, 10**20)),
        ("kv_utilization", (0, 1.1, float("nan"), "half")),
        ("reserve_gib", (-1, float("inf"), 10**400)),
        ("kv_gib", (0, 1e300)),
        ("prefix_cache", (None, "no", 1)),
        ("overlap", ("no",)),
        ("ops", (None, 3)),
        ("eager", (0,)),
        ("dummy_weights", ("yes",)),
        ("seed", (-1, 2**63, 2**70, 1.0, "3")),
    ],
)
def test_a_setting_that_can_not_work_is_refused_by_name(name: str, bad: tuple[object, ...]) -> None:
    """Every value outside of what is documented is an InvalidSetting that names its field."""
    for value in bad:
        with pytest.raises(InvalidSetting) as refusal:
            Settings(**{name: value})  # type: ignore[arg-type]
        assert refusal.value.field == name


@pytest.mark.parametrize("memory_gib", [0, -1, float("nan"), 1e300])
def test_a_memory_plan_names_its_own_parameter(memory_gib: float) -> None:
    """A memory that no device has is refused as memory_gib, before the folder is looked at."""
    with pytest.raises(InvalidSetting) as refusal:
        memory_plan(Path("nowhere"), memory_gib=memory_gib)
    assert refusal.value.field == "memory_gib"
