"""Limits: every size is checked where it is set, and named."""

from __future__ import annotations

import pytest

from agentinfer.errors import InvalidSetting
from engines import limits

SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("bad", [0, -1, 1.0, "4", None, True])
def test_a_size_is_a_positive_integer(name: str, bad: object) -> None:
    """Zero, negatives, fractions, text and booleans are refused under the setting's name."""
    with pytest.raises(InvalidSetting) as refusal:
        limits(**{name: bad})
    assert refusal.value.field == name


@pytest.mark.parametrize("bad", [(1000,), (-1,), (1.0,), ("2",), (3, 1000)])
def test_end_tokens_are_in_the_vocabulary(bad: tuple) -> None:
    """An end token outside the vocabulary is refused."""
    with pytest.raises(InvalidSetting, match="eos_ids"):
        limits(eos_ids=bad)
