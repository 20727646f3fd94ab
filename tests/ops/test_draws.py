"""Draws against the exact distribution, for every filter alone and together, and after edits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

import draws
from agentinfer.ops.edit import edit_rows
from agentinfer.ops.sample import sample

CPU = torch.device("cpu")
NAMES = list(draws.CASES)


def logits_of(names: list[str], each: int) -> Tensor:
    """*each* rows for each case of *names*, after its edits."""
    rows = [NAMES.index(name) + 1 for name in names for _ in range(each)]
    tables = draws.tables_of(CPU)
    asks = [row if row <= len(tables.bias) - 1 and NAMES[row - 1].startswith("edited") else -1 for row in rows]
    return edit_rows(torch.from_numpy(draws.LOGITS)[None], draws.edit_inputs([0] * len(rows), asks, asks), tables)


def counts_of(names: list[str], batch: int, total: int) -> dict[str, np.ndarray]:
    """How often each token comes in *total* draws a case, *batch* samples a step: half of the draws are of one seed
    and many output indices, half of many seeds.
    """
    each = batch // len(names)
    logits, found = logits_of(names, each), {name: np.zeros(len(draws.LOGITS), np.int64) for name in names}
    for first in range(0, total, each):
        numbers = np.arange(first, first + each)
        many = numbers % 2 == 0
        seeds, index = np.where(many, numbers, 7), np.where(many, 0, numbers).astype(np.int32)
        s = draws.together([draws.columns(draws.CASES[name], seeds, index) for name in names])
        tokens, ok = sample(logits, s)
        assert bool(ok.all())
        for name, own in zip(names, tokens.numpy().reshape(len(names), each), strict=True):
            found[name] += np.bincount(own, minlength=len(draws.LOGITS))
    return found


def test_the_cases_are_what_they_seem() -> None:
    """The exact distributions are of different support, and a cut of top-k or top-p meets a tie."""
    supports = {name: tuple(np.flatnonzero(draws.exact(draws.edited(p), p))) for name, p in draws.CASES.items()}
    assert supports["plain"] == tuple(range(12))
    assert supports["top_k"] == (0, 1, 2, 5, 9)
    assert supports["top_p"] == (0, 1, 2, 5, 9)
    assert supports["together"] == (0, 5, 9)
    np.testing.assert_allclose(
        draws.exact(np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])), evolve(draws.CASES["top_p"], top_p=0.7)),
        np.array([0.5, 0.3125, 0.1875, 0, 0, 0]),
    )


@pytest.mark.parametrize("total", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_draws_of_a_batch_have_the_exact_distribution(total: int) -> None:
    """All cases side by side in steps of 63 or 64 samples."""
    for name, counts in counts_of(NAMES, 64, total).items():
        draws.check(counts, draws.exact(draws.edited(draws.CASES[name]), draws.CASES[name]), name)


@pytest.mark.parametrize("name", NAMES)
def test_draws_alone_are_those_of_a_batch(name: str) -> None:
    """A sample a step, of each case: the same tokens, one by one, as in a batch with all the other cases."""
    asked = draws.CASES[name]
    numbers = np.arange(300)
    alone = logits_of([name], 1)
    got = [int(sample(alone, draws.columns(asked, numbers[i : i + 1], np.zeros(1, np.int32)))[0]) for i in range(300)]
    s = draws.together([draws.columns(p, numbers, np.zeros(300, np.int32)) for p in draws.CASES.values()])
    tokens = sample(logits_of(NAMES, 300), s)[0].view(len(NAMES), 300)
    assert tokens[NAMES.index(name)].tolist() == got


@pytest.mark.slow
@pytest.mark.parametrize("name", ["together", "edited, together"])
def test_draws_alone_have_the_exact_distribution(name: str) -> None:
    """100,000 steps of one sample."""
    (counts,) = counts_of([name], 1, 100_000).values()
    draws.check(counts, draws.exact(draws.edited(draws.CASES[name]), draws.CASES[name]), name)


def test_a_wrong_distribution_is_noticed() -> None:
    """The test itself: draws at a temperature 3% off, or of one token too many, do not pass."""
    (counts,) = counts_of(["temperature"], 64, 100_000).values()
    params = draws.CASES["temperature"]
    draws.check(counts, draws.exact(draws.edited(params), params), "right")
    with pytest.raises(AssertionError, match="chi-square"):
        draws.check(counts, draws.exact(draws.edited(params) * 1.03, params), "wrong")
    with pytest.raises(AssertionError, match="which the filters take away"):
        draws.check(counts, draws.exact(draws.edited(params), draws.CASES["top_k"]), "wrong")
