"""Tokens chosen by ranks that each have a part of the vocabulary: those of one rank, to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentinfer.ops.comm import Group, alone
from agentinfer.ops.parts import choose_parts, sample_parts
from agentinfer.ops.sample import sample
from agentinfer.ops.threads import Threads
from agentinfer.state.columns import PARAMS
from agentinfer.state.plan import SamplingColumns


def columns(temperature: list[float], seed: list[int], index: list[int]) -> SamplingColumns:
    params = np.zeros(len(temperature), PARAMS)
    params["temperature"], params["seed"], params["top_p"] = temperature, seed, 1
    return SamplingColumns(params, np.array(index, np.int32), ())


def part(logits: Tensor, group: Group) -> Tensor:
    """What rank has of *logits*, with padding that would win everything."""
    width = -(-logits.shape[1] // group.size)
    padding = torch.full((len(logits), width * group.size - logits.shape[1]), 1e9)
    return torch.cat((logits, padding), 1)[:, width * group.rank : width * (group.rank + 1)]


def of_ranks(size: int, logits: Tensor, s: SamplingColumns) -> list[Tensor]:
    return Threads.of(size).run(lambda group: sample_parts(part(logits, group), s, group, logits.shape[1]))


NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 3.5, -math.inf]),
    st.floats(-30, 30, width=32),
    st.floats(-(2.0**127), 2.0**127, width=32),
)
ROWS = st.integers(1, 40).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.lists(NUMBERS, min_size=width, max_size=width),
            st.sampled_from([0.0, 9e-6, 1e-5, 0.3, 1.0, 2.0, 50.0]),
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**31 - 1),
        ),
        min_size=1,
        max_size=4,
    )
)


@given(size=st.integers(2, 5), rows=ROWS)
@settings(deadline=None)
def test_tokens_are_those_of_one_rank(size: int, rows: list[Any]) -> None:
    """Greedy and noisy samples of any logits, with ties, huge ones and ids that can never be, over any number of ranks,
    some of which may have nothing but padding.
    """
    logits = torch.tensor([row[0] for row in rows], dtype=torch.float32)
    s = columns(*([row[i] for row in rows] for i in (1, 2, 3)))
    tokens, ok = sample(logits, s)
    for got in of_ranks(size, logits, s):
        assert got[1].tolist() == ok.to(torch.int64).tolist()
        assert got[0][ok].tolist() == tokens[ok].tolist()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_wide_rows(size: int) -> None:
    """Of a vocabulary of thousands, where most noise is never computed, tokens stay the same for many seeds."""
    logits = 3 * torch.randn(32, 5000, generator=torch.Generator().manual_seed(3))
    s = columns([0.0, *[1.3] * 31], list(range(32)), list(range(32)))
    tokens, _ = sample(logits, s)
    assert len(tokens.unique()) > 20
    for got in of_ranks(size, logits, s):
        assert got[0].tolist() == tokens.tolist()


@pytest.mark.parametrize("where", [0, 5, 11])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_sound_fails_alone(where: int, value: float) -> None:
    """A NaN or +inf on one rank is known to all, and the other rows are chosen as ever."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    logits[1, where] = value
    s = columns([1.0, 1.0, 0.0], [1, 2, 3], [0, 0, 0])
    tokens, _ = sample(logits, s)
    for got in of_ranks(3, logits, s):
        assert got[1].tolist() == [1, 0, 1]
        assert got[0, [0, 2]].tolist() == tokens[[0, 2]].tolist()


def test_kernels_take_its_place() -> None:
    """Where these ops have one that a graph can capture, it is given what samples ask for, in words."""
    seen: list[Any] = []

    def part_rows(logits: Tensor, params: Tensor, index: Tensor, group: Group, vocab: int, *out: Tensor) -> None:
        seen.append((params.shape, params.dtype, index.tolist(), group.size, vocab))
        out[0].fill_(4)
        out[1].fill_(1)

    chosen = choose_parts(part_rows, torch.zeros(2, 6), columns([0.0, 1.0], [1, 2], [7, 8]), alone().tp, 5)
    assert chosen.tolist() == [[4, 4], [1, 1]]
    assert seen == [((2, 8), torch.int32, [7, 8], 1, 5)]
