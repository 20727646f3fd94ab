"""Which log-probabilities a step has to find: of what it samples, and of the tokens of prompts that it computes. Pure.

Rows that ask for none cost a look at two columns, and nothing in a decode over the same rows as the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from agentinfer.state.columns import ColumnsDraft
from agentinfer.state.ids import I32, ints, seal
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Scored
from agentinfer.state.request import Request
from agentinfer.state.sequence import Running

MOST_LOGITS: Final = 1 << 25
"""Logits that one step has for tokens of prompts, if one position has no more: 134 MB."""


def most_scored(limits: Limits) -> int:
    """Tokens of prompts that one step judges, at most."""
    return max(1, MOST_LOGITS // limits.vocab_size)


def scored_of(request: Request) -> int:
    """Columns.scored of a sequence of *request*."""
    return 0 if request.params.prompt_logprobs is None else len(request.prompt) - 1


def fewer(start: int, count: int, scored: int, room: int) -> tuple[int, int]:
    """How many of *count* positions from *start* on a step with *room* computes of a row that wants *scored* judged,
    and what is left of the room.
    """
    judged = max(0, min(start + count, scored) - start)
    return (count, room - judged) if judged <= room else (room, 0)


def within(cols: ColumnsDraft, rows: I32, count: I32, room: int) -> tuple[I32, int]:
    """*count* of *rows*, as far as there is *room* to judge, first come first served; and what is left of it."""
    if not np.count_nonzero(cols.scored):
        return count, room
    start = cols.computed.take(rows)
    count = count.copy()
    for i in ints(np.flatnonzero(cols.scored.take(rows) > start)):
        count[i], room = fewer(int(start[i]), int(count[i]), int(cols.scored[rows[i]]), room)
    return count, room


def logprobs_wanted(cols: ColumnsDraft, rows: I32) -> I32 | None:
    """Plan.logprobs of samples of *rows*."""
    wanted = cols.logprobs.take(rows)
    if not np.count_nonzero(wanted >= 0):
        return None
    seal(wanted)
    return wanted


def scored_by(cols: ColumnsDraft, rows: I32, start: I32, end: I32, running: Callable[[int], Running]) -> Scored | None:
    """Plan.scored of *rows*, which compute positions *start* .. *end* - 1."""
    if not np.count_nonzero(cols.scored):
        return None
    stop = np.minimum(end, cols.scored.take(rows))
    first = np.cumsum(end - start, dtype=np.int32) - (end - start)  # flat
    pieces: list[I32] = []
    for i in ints(np.flatnonzero(stop > start)):
        request = running(int(rows[i])).request
        at = np.arange(start[i], stop[i], dtype=np.int32)
        tokens = request.prompt[int(start[i]) + 1 : int(stop[i]) + 1]
        pieces.append(
            np.stack([
                np.full_like(at, i), at - start[i] + first[i], at + 1, np.array(tokens, np.int32),
                np.full_like(at, request.params.prompt_logprobs),
            ])
        )  # fmt: skip
    if not pieces:
        return None
    found = np.concatenate(pieces, axis=1)
    seal(found)
    return Scored(*found)
