"""Ragged attention by Triton kernels, interpreted on the CPU, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from agentinfer.errors import GraphBinding, InvalidSetting
from agentinfer.ops import ragged
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import HostRows
from agentinfer.ops.kernels.attend_prefill import chunk_tile
from agentinfer.ops.provide import attend_reference
from ops.ragged import Case, case

MIXED = ([1, 20, 5, 3, 1, 70], [1, 20, 60, 40, 130, 100])
"""Decode rows of a short and a long context, a fresh prompt, chunks over cached prefixes, few queries, many."""


def same(x: Case, window: int | None = None) -> None:
    """The result and the cache are those of the reference, within 1e-5."""
    got, cache = x.attend(ragged.attend_ragged, window)
    want, wanted = x.attend(attend_reference, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for plane, other in ((cache.k, wanted.k), (values_of(cache), values_of(wanted))):
        torch.testing.assert_close(plane[1:], other[1:], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_mixed_step_equals_the_reference(block_size: int, group: int, head_dim: int) -> None:
    """Chunks, cached prefixes and decode rows in one step give the reference's result and leave its cache, over blocks
    of NaN.
    """
    same(case(*MIXED, HeadShape(2 * group, 2, head_dim), block_size))


@pytest.mark.parametrize("window", [1, 7, 32, 40, 1000])
@pytest.mark.parametrize("group", [1, 3])
def test_windows(group: int, window: int) -> None:
    """A window hides what the reference's hides: of one key, of less and more than a step of keys, of all."""
    same(case(*MIXED, HeadShape(2 * group, 2, 64), 16), window)


@pytest.mark.parametrize("norm", [True, False])
def test_with_and_without_norms(norm: bool) -> None:
    """Queries and keys are normed where there are weights, and only there."""
    same(case([4, 1], [9, 3], HeadShape(4, 1, 64), 16, norm=norm))


@pytest.mark.parametrize("edge", [31, 32, 33, 64, 65])
def test_lengths_around_a_tile(edge: int) -> None:
    """Chunks and contexts that end before, at and after the edge of a tile lose no key and see none too many."""
    same(case([edge, 1, 11], [edge, edge, edge + 10], HeadShape(4, 2, 64), 16))


def test_padding_rows_give_zeros_and_change_nothing() -> None:
    """Rows of padding give zeros over a sink of NaN, and the other rows are what they are without them."""
    shape = HeadShape(4, 2, 64)
    plain, padded = (case([20, 1], [30, 9], shape, 16, padding=n) for n in (0, 3))
    padded = evolve(padded, qkv=torch.cat((plain.qkv, padded.qkv[len(plain.qkv) :])), layer=plain.layer,
                    q_norm=plain.q_norm, k_norm=plain.k_norm)  # fmt: skip
    want, _ = plain.attend(ragged.attend_ragged)
    got, _ = padded.attend(ragged.attend_ragged)
    assert torch.equal(got[: len(want)], want)
    assert not got[len(want) :].any()


def test_the_work_list_covers_every_query_once_and_begins_with_the_longest() -> None:
    """Tiles name each query of their rows once, with its position and table row, and no tile is empty."""
    host = HostRows(rows=(3, 0, 2, 5), start=(2, 0, 90, 7), count=(10, 1, 7, 1), context=(12, 1, 97, 8))
    tiles = ragged.tiles_of(host, [0, 1, 2], 4)
    keys = tiles[:, 1] + tiles[:, 2]
    assert (np.diff(keys) <= 0).all()
    assert (tiles[:, 1] > 0).all()
    seen = sorted((f + i, p + i, row) for f, n, p, row in tiles.tolist() for i in range(n))
    rows = [(i, 2 + i, 3) for i in range(10)] + [(10, -1, 0)] + [(11 + i, 90 + i, 2) for i in range(7)]
    assert seen == rows


def test_one_work_list_serves_all_layers_of_a_step() -> None:
    """The work list is made once a step, and again for another dtype."""
    x = case([20, 1], [30, 9], HeadShape(4, 2, 64), 16)
    first = ragged.work_of(x.x, x.shape, torch.float32, 16)
    assert ragged.work_of(x.x, x.shape, torch.float32, 16) is first
    assert ragged.work_of(x.x, x.shape, torch.bfloat16, 16) is not first


def test_few_rows_get_small_tiles() -> None:
    """Tiles are halved where whole ones would leave multiprocessors idle."""
    assert chunk_tile(torch.bfloat16, 128, 128 * 32).rows == 64
    assert chunk_tile(torch.bfloat16, 128, 8192 * 32).rows == 128


def test_what_the_kernels_do_not_support_is_refused_by_name() -> None:
    """Other head sizes, partial rope, too many heads a group, another dtype of the cache, one norm of two, and steps
    without lengths on the host raise.
    """
    good = case([2], [2], HeadShape(2, 1, 64), 16)
    small = case([2], [2], HeadShape(2, 1, 32), 16)
    for wrong, message in (
        (small, "head_dim 32"),
        (evolve(good, table=good.table[:, :32]), "32 are rotated"),
        (evolve(good, shape=HeadShape(34, 2, 64)), "34 query heads"),
        (evolve(good, qkv=good.qkv.half()), "float16"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            wrong.attend(ragged.attend_ragged)
    with pytest.raises(ValueError, match="one norm weight"):
        evolve(good, k_norm=None).attend(ragged.attend_ragged)
    with pytest.raises(GraphBinding):
        evolve(good, x=evolve(good.x, host=None)).attend(ragged.attend_ragged)
