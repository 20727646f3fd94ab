"""Rejection sampling: what becomes of a guess that was drawn from another distribution. Exact: the token is distributed
as if the guess had never been.

A guess x ~ q stands with probability min(1, p(x) / q(x)); if it does not, the token is drawn from max(0, p - q),
renormalised, in which x is not. Noise: Philox as in ops.sample, with key = seed and counter = (0, output index, 1, 0),
whose words w0, w1 give u = (w + 0.5) * 2^-32: so it is independent of all noise that draws tokens or guesses.

**Source**: Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding"; Chen et al.
2023, "Accelerating large language model decoding with speculative sampling". V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentinfer.ops.sample import philox

F64 = npt.NDArray[np.float64]


def coins(seed: int, index: int) -> tuple[float, float]:
    """Two independent numbers, uniform in (0, 1), for output *index* of a sequence with *seed*."""
    zero, one, at = (np.array([word], np.uint64) for word in (0, 1, index))
    first, second, _, _ = philox((zero, at, one, zero), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return (float(first[0]) + 0.5) * 2.0**-32, (float(second[0]) + 0.5) * 2.0**-32


def reject(p_V: F64, q_V: F64, guess: int, seed: int, index: int) -> int:
    """The token at output *index*: *guess*, drawn from *q*, or another one; distributed as *p*."""
    stands, other = coins(seed, index)
    if stands * q_V[guess] < p_V[guess]:
        return guess
    rest: F64 = np.cumsum(np.maximum(p_V - q_V, 0))
    mass = float(rest[-1])
    if mass <= 0:  # p is q but for rounding
        return guess
    return int(np.count_nonzero(rest <= other * mass))
