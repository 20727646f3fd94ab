"""The steps that are run at start: on a GPU what they take is measured; here, that the largest are the largest."""

from __future__ import annotations

import pytest
import torch

from agentinfer.build import Settings, build
from agentinfer.state.limits import Limits
from agentinfer.trial import LARGEST, sized_steps, trial_steps, try_step, warmed
from tiny import write_tiny


@pytest.mark.parametrize("budget", [8, 64, 8192])
@pytest.mark.parametrize("rows", [1, 4, 256])
@pytest.mark.parametrize("longest", [1, 17, 4096])
def test_trials_keep_the_limits(budget: int, rows: int, longest: int) -> None:
    """No trial has more positions, rows or a longer row than a step can have, and the first ones have the most."""
    limits = Limits(16, 10_000, rows, budget, longest, 1000)
    steps = trial_steps(limits)
    for start, counts in [*steps, *sized_steps(limits)]:
        assert 0 < len(counts) <= rows
        assert sum(counts) <= budget
        assert start + max(counts) <= longest
    assert max(sum(counts) for _, counts in steps) == max(sum(counts) for _, counts in steps[:LARGEST])
    assert max(len(counts) for _, counts in steps) == max(len(counts) for _, counts in steps[:LARGEST])


def test_sizes_double() -> None:
    """Positions and rows in decode double from step to step, up to what a step can have."""
    steps = sized_steps(Limits(16, 10_000, 24, 256, 4096, 1000))
    assert [sum(counts) for _, counts in steps] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert [counts[1:].count(1) for _, counts in steps] == [1, 2, 4, 8, 16, 23, 23, 23]
    assert all(start == 16 for start, _ in steps)


def test_a_warmed_device_is_as_good_as_new(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle is live, its table empty; steps that its blocks can not hold are left out."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    folder = write_tiny(tmp_path)
    settings = Settings(device="cpu", num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
                        max_model_len=64)  # fmt: skip
    machine, device = build(folder, settings, ())
    after = warmed(machine, device)
    after.kv.check("step")
    assert after.last.tolist() == [0] * 5
    again = try_step(machine, after, 0, [3, 1])
    again.kv.check("step")
