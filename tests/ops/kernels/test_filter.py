"""Filters without sorting, in Triton's interpreter, against ops/sample.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentinfer.ops import sample
from agentinfer.ops.kernels import filter as kernel
from agentinfer.ops.kernels.filter import filter_rows
from agentinfer.state.columns import PARAMS


def run(logits: Tensor, asked: list[dict[str, Any]], tile: int = 64) -> list[list[int]]:
    """The ids that are left of each row; asserts that they keep their logits."""
    params = np.zeros(len(asked), PARAMS)
    params["top_p"] = 1
    for row, settings in zip(params, asked, strict=True):
        for name, value in settings.items():
            row[name] = value
    got = logits.clone()
    filter_rows(got, torch.from_numpy(params.view(np.int32).reshape(len(asked), -1)), tile=tile)
    left = got > -math.inf
    assert torch.equal(got[left], logits[left])
    return [row.nonzero().view(-1).tolist() for row in left]


def want(row: Tensor, settings: dict[str, Any]) -> list[int]:
    return sample.survivors(row.numpy(), **settings)[0].tolist()


SETTINGS = [
    {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"temperature": 0.5, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.999, "top_k": 150},
    {"temperature": 1e-5, "top_k": 3}, {"temperature": 1.0, "min_p": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("levels", [0, 4])
def test_what_is_left_is_what_the_reference_leaves(settings: dict[str, Any], levels: int) -> None:
    """Each filter and all together leave the reference's tokens, of rows with ties (few levels) and without."""
    logits = 3 * torch.randn(2, 150, generator=torch.Generator().manual_seed(levels))
    logits = (logits * levels).round() / levels if levels else logits
    logits[1, 7:90] = -math.inf
    assert run(logits, [settings] * 2) == [want(row, settings) for row in logits]


def test_ties_at_every_cut_keep_the_lowest_ids() -> None:
    """Of equal logits top-k keeps exactly k, top-p as many as it needs, the lowest ids first, across tiles too."""
    logits = torch.zeros(4, 200)
    asked = [{"temperature": 1.0, "top_k": 70}, {"temperature": 1.0, "top_p": 0.5},
             {"temperature": 1.0, "top_p": 0.5, "top_k": 80}, {"temperature": 0.9, "min_p": 0.5}]  # fmt: skip
    assert [len(row) for row in run(logits, asked)] == [70, 100, 40, 200]
    assert all(row == list(range(len(row))) for row in run(logits, asked))
    assert run(logits, asked) == [want(row, settings) for row, settings in zip(logits, asked, strict=True)]


def test_rows_without_filters_and_unsound_rows_stay() -> None:
    """Greedy rows, rows that ask nothing, and rows with NaN, +inf or nothing but -inf are not written."""
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    logits[2, 5], logits[3, 6], logits[4] = math.nan, math.inf, -math.inf
    plain = {"temperature": 1.0, "top_k": 2}
    params = np.zeros(6, PARAMS)
    params["top_p"], params["top_k"], params["temperature"] = 1, [2, 0, 2, 2, 2, 100], [0.0, 1, 1, 1, 1, 1]
    got = logits.clone()
    filter_rows(got, torch.from_numpy(params.view(np.int32).reshape(6, -1)), tile=64)
    torch.testing.assert_close(got, logits, rtol=0, atol=0, equal_nan=True)
    assert run(logits[:1], [plain]) == [want(logits[0], plain)]


def test_rows_of_any_stride_and_extreme_logits() -> None:
    """What lies between rows is not written, and differences that overflow count as nothing."""
    big = torch.finfo(torch.float32).max
    wide = torch.full((2, 80), 5.0)
    wide[:, :70] = -big
    wide[:, 3], wide[0, 66] = big, big
    asked = np.zeros(2, PARAMS)
    asked["temperature"], asked["top_p"] = [1.0, 1e-5], 0.9
    with np.errstate(over="ignore"):  # to infinity, as the reference
        filter_rows(wide[:, :70], torch.from_numpy(asked.view(np.int32).reshape(2, -1)), tile=32)
    assert (wide[:, 70:] == 5).all()
    assert [(row > -math.inf).nonzero().view(-1).tolist() for row in wide[:, :70]] == [[3, 66], [3]]


def test_its_slack_is_the_reference_s() -> None:
    """An equality is kept by the same slack here and on the host."""
    assert kernel.SLACK == sample.TIE
