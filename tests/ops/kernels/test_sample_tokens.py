"""Sampling on the device, in Triton's interpreter, against ops/sample.py."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops import sample
from agentinfer.ops.comm import Group
from agentinfer.ops.kernels import noise
from agentinfer.ops.kernels import sample as kernel
from agentinfer.ops.kernels.sample import sample_parts, sample_tokens
from agentinfer.ops.threads import Threads
from agentinfer.state.columns import PARAMS


@triton.jit
def _noise(out, seed, index, DEVICE: tl.constexpr):
    block, lane = tl.arange(0, 256), tl.arange(0, 4)
    tl.store(
        out + block[:, None] * 4 + lane[None, :],
        noise._gumbel(tl.load(seed), tl.load(seed + 1), tl.load(index), block, lane, DEVICE),
    )


@triton.jit
def _noise_of(out, first, BLOCK: tl.constexpr, DEVICE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, noise._gumbel_of(first + at, DEVICE))


@triton.jit
def _high(x, DEVICE: tl.constexpr):
    y = tl.log2(x)
    return y + 2.384185791015625e-07 * tl.where((x < 0.5) | (x > 2.0), tl.abs(y), 1.0)


@triton.jit
def _low(x, DEVICE: tl.constexpr):
    y = tl.log2(x)
    return y - 2.384185791015625e-07 * tl.where((x < 0.5) | (x > 2.0), tl.abs(y), 1.0)


def run(
    logits: Tensor, temperature: list[float], seed: list[int], index: list[int], **filters: list[float]
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Tokens, ok. Asserts that rows without filters stay as they are."""
    count, before = len(logits), logits.clone()
    params = np.zeros(count, PARAMS)
    params["temperature"], params["seed"], params["top_p"] = temperature, seed, 1
    for name, values in filters.items():
        params[name] = values
    tokens, ok = torch.full((2, count), -1)
    words = torch.from_numpy(params.view(np.int32).reshape(count, -1))
    sample_tokens(logits, words, torch.tensor(index, dtype=torch.int32), tokens, ok)
    assert set(ok.tolist()) <= {0, 1}
    if not filters:
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return tokens.tolist(), [x == 1 for x in ok.tolist()]


def want(logits: Tensor, temperature: float, seed: int, index: int, **filters: float) -> int:
    if temperature < sample.GREEDY_BELOW:
        return int(logits.argmax())
    return sample.choose(*sample.survivors(logits.numpy(), temperature, **filters), seed, index)


@pytest.mark.parametrize("seed", [0, 12345, 2**62 + 7, -1])
def test_the_noise_is_that_of_the_reference(seed: int) -> None:
    """Philox and both logarithms in float32 stay within 2e-6 of the reference, for any seed."""
    out = torch.empty(1024)
    halves = torch.tensor([seed]).view(torch.int32)
    _noise[(1,)](out, halves, torch.tensor([77], dtype=torch.int32), DEVICE=False)
    np.testing.assert_allclose(out.numpy(), sample.gumbel(seed, 77, np.arange(1024)), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("logarithm", [noise._log2, _high, _low])
def test_all_noise_there_is_keeps_its_bound(logarithm: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of the 2^23 values of u the noise is within 2e-6 of float64's, or 2e-6 of itself, were the GPU's
    logarithm exact or as far off as it may be.
    """
    monkeypatch.setattr(noise, "_log2", logarithm)
    block = 2**20
    for first in range(0, 2**23, block):
        out = torch.empty(block)
        _noise_of[(1,)](out, first, block, DEVICE=False)
        want = -np.log(-np.log((first + np.arange(block) + 0.5) * 2.0**-23))
        off = np.abs(out.numpy() - want) / (2e-6 + 2e-6 * np.abs(want))
        assert off.max() < 0.25


@pytest.mark.parametrize("vocabulary", [5, 1024, 2500])
def test_tokens_are_those_of_the_reference(vocabulary: int) -> None:
    """Greedy and noisy rows in one batch choose what the reference chooses, rows of any stride included."""
    wide = 4 * torch.randn(6, vocabulary + 3, generator=torch.Generator().manual_seed(1))
    logits = wide[:, :vocabulary]
    temperature = [0.0, 0.5, 1.0, 1e-5, 30.0, 9e-6]
    seed, index = [1, 2**40 + 5, -7, 3, 4, 5], [0, 1, 2000, 3, 4, 5]
    tokens, ok = run(logits, temperature, seed, index)
    assert tokens == [want(*row) for row in zip(logits, temperature, seed, index, strict=True)]
    assert all(ok)


def test_filters_come_first() -> None:
    """Rows with top-k, top-p or min-p beside rows without choose what the reference chooses."""
    logits = 2 * torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    asked: dict[str, list[float]] = {
        "top_k": [3, 0, 0, 20, 0], "top_p": [1, 0.7, 1, 0.9, 1], "min_p": [0, 0, 0.2, 0.01, 0],
    }  # fmt: skip
    rows = [{name: values[i] for name, values in asked.items()} for i in range(5)]
    for seed in range(4):
        wanted = [want(row, 0.9, seed, 7, **settings) for row, settings in zip(logits, rows, strict=True)]
        assert run(logits.clone(), [0.9] * 5, [seed] * 5, [7] * 5, **asked) == (wanted, [True] * 5)


def test_ties_go_to_the_lowest_id() -> None:
    """Of equal logits, -0 and 0 too, in one tile and across tiles, the lowest id wins."""
    logits = torch.full((2, 2100), -1.0)
    logits[0, 40] = logits[0, 41] = logits[0, 2000] = 2.0
    logits[1, 1500], logits[1, 1501] = -0.0, 0.0
    assert run(logits, [0.0, 0.0], [0, 0], [0, 0]) == ([40, 1500], [True, True])


def test_extreme_logits_do_not_overflow() -> None:
    """With the largest and smallest floats as logits, and -inf beside them, the largest wins at any temperature."""
    big = torch.finfo(torch.float32).max
    logits = torch.full((3, 1100), -big)
    logits[:, 1050], logits[:, 7], logits[1, :1024] = big, big / 2, -math.inf
    with np.errstate(over="ignore"):  # to -inf, as the reference
        assert run(logits, [0.0, 1e-5, 1.0], [1, 2, 3], [0, 0, 0]) == ([1050] * 3, [True] * 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unsound_rows_are_reported(temperature: float) -> None:
    """NaN, +inf or nothing but -inf make a row not ok, its token stays in the vocabulary, and other rows are sound."""
    logits = torch.randn(4, 1100, generator=torch.Generator().manual_seed(2))
    logits[0, 1099], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    tokens, ok = run(logits, [temperature] * 4, [1] * 4, [0] * 4)
    assert ok == [False, False, False, True]
    assert all(0 <= token < 1100 for token in tokens)
    assert tokens[3] == want(logits[3], temperature, 1, 0)


@pytest.mark.parametrize(("vocabulary", "size"), [(97, 4), (2500, 2), (9000, 3), (5, 4)])
def test_parts_of_a_row_choose_as_one(vocabulary: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that each have a part of the vocabulary choose what one has chosen, whatever lies on which tile; what is
    padding never wins, equals go to the lowest id, and a NaN on one rank is known to all.
    """
    monkeypatch.setattr(kernel, "TILE", 1024)
    rows = 3 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(1))
    rows[5] = 2.0
    rows[6, vocabulary - 1] = math.nan
    temperature, seed = [0.0, 0.5, 1.0, 1e-5, 30.0, 0.0, 1.0], [1, 2**40 + 5, -7, 3, 4, 5, 6]
    params = np.zeros(7, PARAMS)
    params["temperature"], params["seed"], params["top_k"] = temperature, seed, 1
    words = torch.from_numpy(params.view(np.int32).reshape(7, -1))
    index = torch.arange(7, dtype=torch.int32)
    width, lock = -(-vocabulary // size), threading.Lock()
    padded = torch.cat((rows, torch.full((7, width * size - vocabulary), 1e9)), 1)

    def one_at_a_time(*args: object, plain: Any, **kwargs: object) -> None:
        with lock:
            plain(*args, **kwargs)

    for name in ("_run_tiles", "_run_rows"):
        monkeypatch.setattr(kernel, name, partial(one_at_a_time, plain=getattr(kernel, name)))

    def rank(group: Group) -> list[list[int]]:
        chosen = torch.full((2, 7), -1)
        mine = padded[:, width * group.rank : width * (group.rank + 1)]
        sample_parts(mine, words, index, group, vocabulary, *chosen)
        return chosen.tolist()

    wanted = [want(row, *how) for row, *how in zip(rows[:6], temperature, seed, range(6), strict=False)]
    assert wanted[5] == 0
    for tokens, ok in Threads.of(size).run(rank):
        assert tokens[:6] == wanted
        assert 0 <= tokens[6] < vocabulary
        assert ok == [1] * 6 + [0]
