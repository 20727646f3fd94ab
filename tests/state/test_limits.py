"""Limits: every size is checked where it is set, and named."""

from __future__ import annotations

import pytest

from agentinfer.errors import InvalidSetting
from engines import limits

SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("bad", [0, -1, 1.0, "4", None, True, 2**31, 10**30])
def test_a_size_is_a_positive_integer(name: str, bad: object) -> None:
    """Zero, negatives, fractions, text, booleans and what no int32 holds are refused under the setting's name."""
    with pytest.raises(InvalidSetting) as refusal:
        limits(**{name: bad})
    assert refusal.value.field == name


def test_the_last_tokens_of_all_rows_have_int32_places() -> None:
    """Rows times block size is where a column of last tokens is indexed: what int32 can not is refused."""
    with pytest.raises(InvalidSetting, match="max_num_seqs: 1048576 sequences with blocks of 2048"):
        limits(max_num_seqs=2**20, block_size=2**11)
    limits(max_num_seqs=2**20 - 1, block_size=2**11)


@pytest.mark.parametrize("bad", [(1000,), (-1,), (1.0,), ("2",), (3, 1000), None, 5])
def test_end_tokens_are_in_the_vocabulary(bad: object) -> None:
    """An end token outside the vocabulary is refused, and so is what is no sequence of them."""
    with pytest.raises(InvalidSetting, match="eos_ids"):
        limits(eos_ids=bad)


@pytest.mark.parametrize(("name", "bad"), [("seed", -1), ("seed", 2**63), ("seed", 1.0), ("prefix_cache", "no")])
def test_seed_and_switch_are_checked(name: str, bad: object) -> None:
    """A seed outside of [0, 2**63) and a switch that is no bool are refused under their names."""
    with pytest.raises(InvalidSetting) as refusal:
        limits(**{name: bad})
    assert refusal.value.field == name
    assert limits(seed=2**63 - 1).seed == 2**63 - 1
