"""Settings: what can not work is refused where it is set, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentinfer.build import GIB, Settings, build
from agentinfer.errors import CheckpointError, InvalidSetting
from tiny import write_tiny


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
            Settings(**{name: value})
        assert refusal.value.field == name


BLOCK = 16 * 512
"""Bytes of a KV block of the tiny model."""


def kv_of(blocks: int) -> float:
    """Settings.kv_gib for this many blocks of the tiny model."""
    return blocks * BLOCK / GIB


def test_the_longest_length_is_what_kv_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without max_model_len, KV too small for the model's longest length shortens it, and one warning says so."""
    folder = write_tiny(tmp_path)
    with caplog.at_level("WARNING", "agentinfer"):
        machine, _ = build(folder, Settings(kv_gib=kv_of(3)), ())
    assert (machine.limits.num_blocks, machine.limits.max_model_len) == (3, 48)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["max_model_len is 48"]
    caplog.clear()
    for enough in (Settings(kv_gib=kv_of(16)), Settings(kv_gib=kv_of(3), max_model_len=40)):
        machine, _ = build(folder, enough, ())
        assert machine.limits.max_model_len == (enough.max_model_len or 256)
    assert not caplog.records


@pytest.mark.parametrize("given", [{"kv_gib": kv_of(2), "max_model_len": 33}, {"kv_gib": kv_of(1) / 2}])
def test_a_length_that_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    """A max_model_len that KV can not hold, or KV of less than a block, is refused as the setting that decided."""
    with pytest.raises(InvalidSetting, match="Lower max_model_len, or raise kv_gib") as refusal:
        build(write_tiny(tmp_path), Settings(**given), ())
    assert refusal.value.field == "kv_gib"


def test_the_rule_of_a_cpu_is_kv_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the 2 GiB that nobody asked for are changed by kv_gib, so that is what the refusal names."""
    monkeypatch.setattr("agentinfer.build.CPU_KV_GIB", kv_of(2))
    with pytest.raises(InvalidSetting, match=r"^kv_gib: "):
        build(write_tiny(tmp_path), Settings(device="cpu", max_model_len=33), ())


def test_missing_weights_are_said_before_sizes(tmp_path: Path) -> None:
    """A folder without weights is that, also where KV would be too small."""
    folder = write_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        build(folder, Settings(kv_gib=kv_of(1), max_model_len=33), ())
