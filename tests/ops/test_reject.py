"""Rejection sampling: exact for every pair of distributions, and a guess stands as often as it can."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agentinfer.ops.reject import coins, reject
from agentinfer.ops.sample import choose, gumbel, survivors

N = 4_000
PAIRS = (
    ([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.1, 0.1, 0.2, 0.2, 0.2, 0.2]),
    ([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]),
    ([0.5, 0.5, 0, 0], [0, 0.25, 0.5, 0.25]),
    ([0.7, 0.2, 0.1], [0, 1, 0]),
    ([0, 1, 0], [0.3, 0.3, 0.4]),
    ([0.5, 0.5, 0], [0, 0, 1]),
)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic of *counts* exceeds its mean."""
    assert not counts[p == 0].any()
    want = counts.sum() * p[p > 0]
    statistic = float(((counts[p > 0] - want) ** 2 / want).sum())
    freedom = max(len(want) - 1, 1)
    return (statistic - (len(want) - 1)) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_the_token_is_distributed_as_if_there_were_no_guess(p: list[float], q: list[float]) -> None:
    """4,000 seeds, guesses drawn with the noise that a draft model has: chi-square against p; 1 - TV of them stand."""
    exact, counts, stood = np.array(p), np.zeros(len(p)), 0
    with np.errstate(divide="ignore"):
        ids, z = survivors(np.log(np.array(q)).astype(np.float32), 1.0)
    for seed in range(N):
        guess = choose(ids, z, seed, 5)
        token = reject(exact, np.array(q), guess, seed, 5)
        counts[token] += 1
        stood += token == guess
    assert chi_square(counts, exact) < 4
    chance = float(np.minimum(exact, q).sum())
    assert abs(stood / N - chance) <= 4 * math.sqrt(chance * (1 - chance) / N)


def test_coins_are_uniform_and_independent() -> None:
    """Of two coins, and of the coins of two outputs and of the noise of a token there, no pair is dependent."""
    first = np.array([coins(seed, 3) for seed in range(N)])
    other = np.array([coins(seed, 4)[0] for seed in range(N)])
    noise = np.array([np.exp(-np.exp(-gumbel(seed, 3, np.array([0]))[0])) for seed in range(N)])
    for x, y in ((first[:, 0], first[:, 1]), (first[:, 0], other), (first[:, 0], noise), (first[:, 1], noise)):
        cells = np.histogram2d(x, y, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
        assert chi_square(cells, np.full(64, 1 / 64)) < 4


def test_known_coins() -> None:
    """The numbers are fixed for good: a seed gives the same tokens for ever."""
    assert len({coins(0, 0), coins(0, 1), coins(1, 0), coins(2**32, 0)}) == 4
    assert coins(0, 0) == pytest.approx((0.5166791606461629, 0.9396580854663625), abs=1e-12)


def test_equal_distributions_but_for_rounding() -> None:
    """Where p falls short of q everywhere by a rounding error, the guess stands."""
    q = np.array([0.25, 0.75])
    for seed in range(200):
        assert reject(q * (1 - 1e-16), q, 1, seed, 0) == 1
        assert reject(q * 0.5, q, 1, seed, 0) == 1
