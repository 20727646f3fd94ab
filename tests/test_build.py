"""What a start tries out before it knows how much memory is left for KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.build import GIB, trial_steps
from agentinfer.errors import InvalidSetting
from agentinfer.ops.kv import num_blocks_that_fit
from agentinfer.state.ids import cdiv
from agentinfer.state.limits import Limits


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 9000), st.integers(1, 9000))
def test_trial_steps_are_steps_that_these_limits_allow(size: int, rows: int, budget: int, length: int) -> None:
    """No trial has more rows, positions or context than a real step, and all fit the blocks set aside for them."""
    limits = Limits(size, 5, rows, budget, length, 100)
    for start, counts in trial_steps(limits):
        assert 1 <= len(counts) <= rows
        assert sum(counts) <= budget
        assert all(count >= 1 and start + count <= length for count in counts)
        assert sum(cdiv(start + count, size) for count in counts) <= cdiv(budget, size) + 2 * rows


def test_trial_steps_reach_the_largest() -> None:
    """One step computes the whole budget in few rows, one in all rows."""
    trials = trial_steps(Limits(16, 5, 64, 2048, 4096, 100))
    assert (0, [2048]) in trials
    assert (0, [32] * 64) in trials


def test_kv_blocks_by_the_rule_and_its_figures() -> None:
    """(free - reserve) * utilization // bytes a block: 80 GiB less weights, activations and graphs."""
    left = int((80 - 16 - 3 - 1.5) * GIB)
    block = 2 * 36 * 8 * 128 * 2 * 16
    assert num_blocks_that_fit(free=left, reserve=0, utilization=0.9, bytes_per_block=block) == 24_371
    latent = 27 * 576 * 2 * 64
    assert num_blocks_that_fit(free=left, reserve=0, utilization=0.9, bytes_per_block=latent) == 28_884
    with pytest.raises(InvalidSetting, match="max_model_len"):
        num_blocks_that_fit(free=block * 3, reserve=0, utilization=0.9, bytes_per_block=block, blocks_per_request=3)
