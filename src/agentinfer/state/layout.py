"""Where each position of a step is written and what token is read there; how its samples are chosen. Pure, but for the
draft of columns that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agentinfer.state.columns import PARAMS, ColumnsDraft
from agentinfer.state.engine import known_tokens
from agentinfer.state.ids import I32, I64, ints, seal, some
from agentinfer.state.plan import Edit, SamplingColumns
from agentinfer.state.sequence import Running


def layout(
    cols: ColumnsDraft, running: Callable[[int], Running], rows: I32, start: I32, count: I32, positions: int
) -> tuple[I64, I32, I32]:
    """Slots and input ids of every position, and each row's last flat position. One-position rows need no loop."""
    size = int(cols.tail.shape[1])
    if len(rows) == positions:
        slots, inputs = _single(cols, running, rows, start)
        return slots, inputs, np.arange(len(rows), dtype=np.int32)
    ends = np.cumsum(count, dtype=np.int32)
    slots, inputs = np.empty(positions, np.int64), np.empty(positions, np.int32)
    single = count == 1
    slots[ends[single] - 1], inputs[ends[single] - 1] = _single(cols, running, rows[single], start[single])
    for row, first, n, end in zip(*(ints(x[~single]) for x in (rows, start, count, ends)), strict=True):
        run = running(row)
        position = np.arange(first, first + n, dtype=np.int64)
        blocks = np.array(run.blocks, np.int64)
        slots[end - n : end] = blocks[position // size] * size + position % size
        inputs[end - n : end] = known_tokens(run, int(cols.known[row]), cols.tail)[first : first + n]
        cols.own("tail_block")[row] = run.blocks[(first + n - 1) // size]
    return slots, inputs, ends - 1


def _single(cols: ColumnsDraft, running: Callable[[int], Running], rows: I32, start: I32) -> tuple[I64, I32]:
    """Slot and input id of rows that compute one position: the tail's last token, or one still in flight."""
    size = int(cols.tail.shape[1])
    at = start % size
    slots = cols.tail_block.take(rows) * np.int64(size) + at
    behind = cols.known.take(rows) - start
    inputs = cols.tail.ravel().take(rows * np.int32(size) + at)
    in_flight, early = behind < 1, behind > 1
    if some(in_flight):
        inputs[in_flight] = -1
    if some(early):  # a one-position chunk in the middle of a prompt
        for i, row, position in zip(
            *(ints(x) for x in (np.flatnonzero(early), rows[early], start[early])), strict=True
        ):
            run = running(row)
            full = position // size
            inputs[i] = run.tokens[full][position % size] if full < len(run.tokens) else cols.tail[row, position % size]
    return slots, inputs


def sampling_of(cols: ColumnsDraft, rows: I32, length: I32, before: SamplingColumns | None) -> SamplingColumns:
    """How to choose the token at position *length* of each of *rows*. *before*: of the token before, if that helps."""
    if before is not None and not before.banned:
        params, index = before.params, before.index + 1
    else:
        params = cols.params.take(rows, axis=0).view(PARAMS)[:, 0]
        index = length - params["prompt"]
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if before is None or before.banned:
        held = length < params["floor"]
        stops = cols.stop
        banned = tuple((i, tuple(t for t in ints(stops[rows[i]]) if t >= 0)) for i in ints(np.flatnonzero(held)))
    seal(params, index)
    return SamplingColumns(params, index, banned)


def edits_of(cols: ColumnsDraft, running: Callable[[int], Running], rows: I32) -> tuple[Edit, ...]:
    """Which of the samples, one each of *rows*, have their logits edited."""
    asked = cols.edits.take(rows)
    if not np.count_nonzero(asked):
        return ()
    runs = ((i, running(rows[i])) for i in ints(np.flatnonzero(asked)))
    return tuple(Edit(i, run.row, run.seq, run.request) for i, run in runs)
