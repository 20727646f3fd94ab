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
def _remember(tokens, rows, last, num_rows, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < num_rows
    tl.store(last + tl.load(rows + i, mask=live, other=0), tl.load(tokens + i, mask=live, other=0), mask=live)


def begin(entries_2D: Tensor, table: Tensor, inputs_R: Tensor, rows_R: Tensor, last: Tensor, ids_R: Tensor) -> None:
    """Put blocks entries[1] at the places entries[0] of the flat *table* (all int32); write to *ids_R* (int64) the
    given *inputs_R* (int32), or where they are -1 the last token (int64) of their row.
    """
    most = max(entries_2D.shape[1], len(ids_R))
    _begin[(triton.cdiv(most, TILE),)](
        entries_2D, table, inputs_R, rows_R, last, ids_R, entries_2D.shape[1], len(ids_R), TILE
    )


def remember_rows(tokens_R: Tensor, rows_R: Tensor, last: Tensor) -> None:
    """last[rows] = tokens, all int64. Rows are distinct but for the sink's."""
    _remember[(triton.cdiv(len(tokens_R), TILE),)](tokens_R, rows_R, last, len(tokens_R), TILE)
