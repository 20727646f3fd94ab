"""Filters by rounds of candidates, in Triton's interpreter, against ops/sample.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentinfer.ops import sample
from agentinfer.ops.kernels import filter as kernel
from agentinfer.ops.kernels import sample as plain
from agentinfer.ops.kernels.filter import choose_filtered
from agentinfer.ops.kernels.sample import sample_tokens
from agentinfer.state.columns import PARAMS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, chunks and programs a row of some hundred ids, and rounds after the last of many programs."""
    for module, name, value in (
        (kernel, "TILE", 32), (kernel, "SPLITS", 2), (kernel, "ROUNDS", 1), (kernel, "CHUNK", 8), (kernel, "GATHER", 4),
        (kernel, "GROUP", 2),
        (plain, "TILE", 64), (plain, "CHUNK", 8),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def params_of(asked: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    params = np.zeros(len(asked), PARAMS)
    params["top_p"], params["temperature"] = 1, 1
    for row, one in zip(params, asked, strict=True):
        for name, value in one.items():
            row[name] = value
    return params


def words(params: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(params.view(np.int32).reshape(len(params), -1))


def decide(logits: Tensor, asked: list[dict[str, Any]], tokens: list[int]) -> list[int]:
    """What becomes of the candidates *tokens*, one a row."""
    count, vocabulary = logits.shape
    params, index = words(params_of(asked)), torch.arange(count, dtype=torch.int32)
    tiles = -(-vocabulary // plain.TILE)
    maxima = torch.full((count, tiles * (plain.TILE // plain.CHUNK)), math.nan)
    out, before = torch.tensor(tokens), logits.clone()
    with np.errstate(over="ignore", under="ignore"):  # to infinity and 0, as the reference
        numbers = plain._tiles(logits, params, index, 0, vocabulary, tiles, 1e-5, maxima, pdl=False)
        choose_filtered(logits, params, index, numbers, maxima, out)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return out.tolist()


def want(row: Tensor, how: dict[str, Any]) -> list[int]:
    return sample.survivors(row.numpy(), **{"temperature": 1.0, **how})[0].tolist()


def check(row: Tensor, how: dict[str, Any], tokens: list[int]) -> None:
    """Of the candidates *tokens* those that the reference keeps stay; of the others becomes a kept one above."""
    kept = want(row, how)
    found = decide(row.expand(len(tokens), -1), [how] * len(tokens), tokens)
    assert [token for token, now in zip(tokens, found, strict=True) if token == now] == [x for x in tokens if x in kept]
    assert set(found) <= set(kept)
    assert all((-row[now], now) <= (-row[token], token) for token, now in zip(tokens, found, strict=True))


SETTINGS = [
    {"top_k": 5}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"temperature": 0.5, "top_p": 1e-6},
    {"top_k": 1}, {"top_p": 0.999, "top_k": 60}, {"temperature": 1e-5, "top_k": 3}, {"min_p": 1.0},
    {"temperature": 50.0, "top_p": 0.999999}, {"top_k": 20, "min_p": 0.3}, {"top_p": 0.3, "min_p": 0.2},
    {"temperature": 1e-5, "top_p": 0.5, "top_k": 7},
]  # fmt: skip


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("levels", [0, 4])
def test_what_is_kept_is_what_the_reference_keeps(how: dict[str, Any], levels: int) -> None:
    """Each filter and all together, of rows with ties (few levels) and without, half of them -inf."""
    row = 3 * torch.randn(75, generator=torch.Generator().manual_seed(levels))
    row = (row * levels).round() / levels if levels else row
    row[7:40] = -math.inf
    order = np.argsort(-row.numpy(), kind="stable").tolist()
    last = len(want(row, how))
    check(row, how, order[last - 1 : min(last + 1, 42)])


def test_ties_at_every_cut_keep_the_lowest_ids() -> None:
    """Of equal logits top-k keeps exactly k, top-p as many as it needs, the lowest ids first, across tiles too."""
    row = torch.zeros(200)
    asked: list[dict[str, Any]] = [{"top_k": 70}, {"top_p": 0.5}, {"top_p": 0.5, "top_k": 80}, {"min_p": 0.5}]
    for how, number in zip(asked, (70, 100, 40, 200), strict=True):
        assert want(row, how) == list(range(number))
        check(row, how, [x for x in (number - 1, number) if x < 200])


def test_as_many_as_there_are() -> None:
    """k above the number of finite logits, one finite logit, k of V - 1 and of V."""
    row = torch.full((70,), -math.inf)
    row[[3, 50, 66]] = torch.tensor([1.0, 2.0, 1.0])
    asked = [{"top_k": k, "top_p": p} for k in (1, 2, 3, 4, 69, 70) for p in (1.0, 0.9)]
    found = decide(row.expand(12, -1), asked, [66] * 12)
    assert [now == 66 for now in found] == [66 in want(row, how) for how in asked]
    alone = torch.full((70,), -math.inf)
    alone[64] = -5.0
    for how in ({"top_k": 9}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
        assert decide(alone[None], [how], [64]) == [64]


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_row_and_any_filters(data: st.DataObject) -> None:
    """Rows as a model in bfloat16 gives them, of any width; what is kept is what the reference keeps, but for a token
    whose mass ends within 1e-6 of where top-p cuts.
    """
    width = data.draw(st.integers(1, 140))
    seed, spread = data.draw(st.integers(0, 9)), data.draw(st.sampled_from((0.01, 1.0, 8.0)))
    row = (spread * torch.randn(width, generator=torch.Generator().manual_seed(seed))).to(torch.bfloat16).float()
    how = {
        "temperature": data.draw(st.sampled_from((0.3, 0.9, 1.0, 3.0))), "top_k": data.draw(st.integers(0, width + 1)),
        "top_p": data.draw(st.sampled_from((1.0, 0.95, 0.5, 0.1))), "min_p": data.draw(st.sampled_from((0, 0.05, 0.9))),
    }  # fmt: skip
    tried = data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=3, unique=True))
    kept = want(row, how)
    found = decide(row.expand(len(tried), -1), [how] * len(tried), tried)
    nearly = {x for e in (-3e-6, 3e-6) for x in want(row, {**how, "top_p": how["top_p"] * (1 + e)})}
    for token, now in zip(tried, found, strict=True):
        assert now in nearly or now in kept
        if (token in kept) == (token in nearly):
            assert (token == now) == (token in kept)


def test_tokens_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows, in which first candidates are mostly refused: many rounds, of many programs and of one, give the
    argmax of z + noise over what is kept, alone and in a batch.
    """
    row = 0.1 * torch.randn(120, generator=torch.Generator().manual_seed(5))
    asked = [{"top_p": 0.05}, {"top_k": 3}, {"top_k": 30, "top_p": 0.2}, {"min_p": 0.9}, {}, {"temperature": 0.0}]
    params = params_of(asked)
    params["seed"] = np.arange(6) * 2**40 - 7
    index = torch.arange(6, dtype=torch.int32)
    expected = [
        int(row.argmax()) if p["temperature"] == 0 else sample.choose(
            *sample.survivors(row.numpy(), *(p[x].item() for x in ("temperature", "top_k", "top_p", "min_p"))),
            int(p["seed"]), i,
        )
        for i, p in enumerate(params)
    ]  # fmt: skip
    for rounds in (1, 4):
        monkeypatch.setattr(kernel, "ROUNDS", rounds)
        tokens, ok = torch.full((2, 6), -1)
        sample_tokens(row.expand(6, -1), words(params), index, tokens, ok)
        assert tokens.tolist() == expected
        assert ok.tolist() == [1] * 6
    for i in range(4):
        tokens, ok = torch.full((2, 1), -1)
        sample_tokens(row[None], words(params[i : i + 1]), index[i : i + 1], tokens, ok)
        assert tokens.tolist() == expected[i : i + 1]


def test_what_is_below_is_not_read() -> None:
    """Steps whose maxima are below the candidate, or below the bound where there is none, are not read: what is written
    there after the maxima were taken changes nothing; with top-p they are read once, for the mass of all.
    """
    row = torch.arange(200, 0, -1) / 20
    asked: list[dict[str, Any]] = [{"top_k": 3}, {"top_k": 3}, {"min_p": 0.5}, {"top_k": 9, "min_p": 0.9}]
    logits, tried = row.repeat(4, 1), torch.tensor([2, 199, 150, 70])
    params, index = words(params_of(asked)), torch.arange(4, dtype=torch.int32)
    maxima = torch.empty((4, 4 * 8))
    numbers = plain._tiles(logits, params, index, 0, 200, 4, 1e-5, maxima, pdl=False)
    read = tried.clone()
    choose_filtered(logits, params, index, numbers, maxima, read)
    logits[:, 64:] = row[0]
    again = tried.clone()
    logits[torch.arange(4), tried] = row[tried]
    choose_filtered(logits, params, index, numbers, maxima, again)
    assert again.tolist() == read.tolist()
    assert all(int(x) in want(row, how) for x, how in zip(read, asked, strict=True))


def test_rows_without_filters_and_unsound_rows_stay() -> None:
    """Greedy rows, rows that ask nothing, and rows with NaN, +inf or nothing but -inf keep their token."""
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(3))
    logits[2, 5], logits[3, 6], logits[4] = -math.inf, math.inf, -math.inf
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_k": 2}, {}, {"temperature": 9e-6, "top_p": 0.1}, {"top_k": 2},
        {"top_k": 2, "top_p": 0.5}, {"top_k": 100}, {"top_k": -1},
    ]  # fmt: skip
    low = int(logits[6].argmin())
    assert decide(logits, asked, [low] * 7) == [low] * 7
    broken = torch.randn(1, 100)
    broken[0, 70] = math.nan
    tokens, ok = torch.full((2, 1), -1)
    sample_tokens(broken, words(params_of([{"top_k": 3, "top_p": 0.5}])), torch.zeros(1, dtype=torch.int32), tokens, ok)
    assert ok.tolist() == [0]
    assert 0 <= tokens.item() < 100


def test_rows_of_any_stride_and_extreme_logits() -> None:
    """What lies between rows is not read, and differences that overflow count as nothing."""
    big = torch.finfo(torch.float32).max
    wide = torch.full((4, 80), math.nan)
    wide[:, :70] = -big
    wide[:, 3], wide[::2, 66] = big, big
    asked: list[dict[str, Any]] = [{"top_p": 0.9}, {"temperature": 1e-5, "top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}]
    assert decide(wide[:, :70], asked, [66, 66, 66, 5]) == [66, 3, 66, 3]


def test_its_slack_is_the_reference_s() -> None:
    """An equality is kept by the same slack here and on the host."""
    assert kernel.SLACK == sample.TIE
