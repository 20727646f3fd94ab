"""The first and the last kernel of a captured decode step: what lies between two steps on the device.

No torch reference of its own: `inputs.stage` and `inputs.remember` do the same for eager steps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 256


@triton.jit
def _begin(entries, table, inputs, rows, last, ids, num_entries, num_rows, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = i < num_entries
    place = tl.load(entries + i, mask=there, other=0)
    tl.store(table + place, tl.load(entries + num_entries + i, mask=there, other=0), mask=there)
    live = i < num_rows
    token = tl.load(inputs + i, mask=live, other=0).to(tl.int64)
    row = tl.load(rows + i, mask=live, other=0)
    remembered = tl.load(last + row, mask=live & (token < 0), other=0)
    tl.store(ids + i, tl.where(token < 0, remembered, token), mask=live)


@triton.jit
def _hand_over(sampled, rows, places, last, chosen, num_rows, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < num_rows
    token = tl.load(sampled + i, mask=live, other=0)
    place = tl.load(places + i, mask=live, other=0)
    tl.store(last + tl.load(rows + i, mask=live, other=0), token, mask=live)
    tl.store(chosen + place, token, mask=live)
    tl.store(chosen + num_rows + place, tl.load(sampled + num_rows + i, mask=live, other=0), mask=live)


def begin(entries_2D: Tensor, table: Tensor, inputs_R: Tensor, rows_R: Tensor, last: Tensor, ids_R: Tensor) -> None:
    """Put blocks entries[1] at the places entries[0] of the flat *table* (all int32); write to *ids_R* (int64) the
    given *inputs_R* (int32), or where they are -1 the last token (int64) of their row.
    """
    most = max(entries_2D.shape[1], len(ids_R))
    _begin[(triton.cdiv(most, TILE),)](
        entries_2D, table, inputs_R, rows_R, last, ids_R, entries_2D.shape[1], len(ids_R), TILE
    )


def hand_over(sampled_2R: Tensor, rows_R: Tensor, places_R: Tensor, last: Tensor, chosen_2R: Tensor) -> None:
    """last[rows] = tokens; chosen[:, places] = sampled (tokens, ok). All int64 but *places* (int32, a permutation).
    Rows are distinct but for the sink's.
    """
    count = len(rows_R)
    _hand_over[(triton.cdiv(count, TILE),)](sampled_2R, rows_R, places_R, last, chosen_2R, count, TILE)
