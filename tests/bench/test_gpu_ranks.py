"""benchmarks/gpu_ranks.py: what it would do, and a profile of two ranks over gloo."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentinfer.cli.flags import make_parser
from tiny import write_tiny


@pytest.fixture
def gpu_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script. It imports kernels, so not before tests run: by then Triton's interpreter is chosen for others."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("gpu_ranks")


def test_rows_are_measured_in_order_of_worth(gpu_ranks: Any) -> None:
    """The model at batch 1 and 64 first, then sums; each name is a row, and no limit is longer than all of it."""
    assert gpu_ranks.ORDER[:3] == ("8b-latency", "sums", "8b-eager")
    assert set(gpu_ranks.ORDER) == {"sums", *gpu_ranks.ROWS}
    for model, flags, most_s in gpu_ranks.ROWS.values():
        args = make_parser().parse_args(["bench", *flags.split(), model, "--tp", "2"])
        assert args.bench == flags.split()[0]
        assert most_s <= 150


@pytest.mark.slow
def test_a_profile_says_the_least_of_the_ranks(gpu_ranks: Any, tmp_path: Path) -> None:
    """Of two ranks over gloo: five sums a step of two layers, and a host's time each."""
    found = gpu_ranks.profiled("8b-eager", 100.0, folder=write_tiny(tmp_path), device="cpu", max_model_len=256)
    assert (found["sums"], found["busy_us"]) == (5.0, None)
    assert found["sum_us"] > 0
    assert len(found["host_ms"]) == 2
