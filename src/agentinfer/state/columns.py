"""Columns: the numbers of the running sequences that change on every step, one element a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from agentinfer.state.ids import I32, seal
from agentinfer.state.limits import Limits

STOP_WIDTH = 4
"""Width at which Columns.stop starts; a sequence with more stop ids widens it."""

PARAMS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.int64),
        ("prompt", np.int32),  # tokens of the prompt: output index = length - prompt
        ("floor", np.int32),  # length below which no end token may be sampled
    ]
)
"""What sampling needs of a row: 32 bytes, set at admission, gathered in one operation."""

PARAMS_WIDTH = PARAMS.itemsize // 4


@frozen(eq=False)
class Columns:
    """Read-only. Row r belongs to EngineState.rows[r]; row 0 is the sink.

    ====== ==================================================================
    0 <= written <= computed <= length, and known <= length <= known + 2;
    with drafts in flight length = computed instead
    ------ ------------------------------------------------------------------
    known    tokens whose value is known here
    length   tokens known, or promised by a step in flight, or guessed in it
    computed positions whose KV is written or in flight
    written  positions whose KV has landed
    ====== ==================================================================
    """

    seq: I32
    """SeqId of the row; -1 = free."""
    length: I32
    known: I32
    computed: I32
    written: I32
    limit: I32
    """Length at which to stop."""
    stop: I32
    """[rows, STOP_WIDTH or more] token ids that end the sequence; -1 pads."""
    tail: I32
    """[rows, block_size] token of position p at p % block_size, for the known positions after the last full
    block and for the last known position."""
    tail_block: I32
    """The block of position `computed - 1`, as long as that position is not a block's last."""
    turn: I32
    """The last step that served this row while the budget was short: who waited longest goes first."""
    cached: I32
    """Tokens of the prompt that need not be computed at its first admission."""
    born: I32
    """Step of its admission: an older plan that names this row meant somebody else."""
    edits: I32
    """1: the logits of this row are edited."""
    logprobs: I32
    """Likeliest tokens to tell of beside each sampled one; -1: nothing is to be told."""
    scored: I32
    """Positions below it want the log-probability of the token after them: of a prompt, all but its last, or none."""
    params: I32
    """[rows, PARAMS_WIDTH] the bits of the row's PARAMS."""

    @classmethod
    def empty(cls, limits: Limits) -> Columns:
        """No row in use."""
        n = limits.max_num_seqs + 1

        def zeros() -> I32:
            return np.zeros(n, np.int32)

        columns = cls(
            seq=np.full(n, -1, np.int32),
            length=zeros(),
            known=zeros(),
            computed=zeros(),
            written=zeros(),
            limit=zeros(),
            stop=np.full((n, STOP_WIDTH), -1, np.int32),
            tail=np.zeros((n, limits.block_size), np.int32),
            tail_block=zeros(),
            turn=zeros(),
            cached=zeros(),
            born=zeros(),
            edits=zeros(),
            logprobs=np.full(n, -1, np.int32),
            scored=zeros(),
            params=np.zeros((n, PARAMS_WIDTH), np.int32),
        )
        seal(*(getattr(columns, name) for name in FIELDS))
        return columns


FIELDS: tuple[str, ...] = (
    "seq", "length", "known", "computed", "written", "limit", "stop", "tail", "tail_block", "turn", "cached", "born",
    "edits", "logprobs", "scored", "params",
)  # fmt: skip


class ColumnsDraft:
    """Columns, thawed: a column is copied at its first write. Mutable on purpose; local to one call."""

    __slots__ = (*FIELDS, "_owned")
    seq: I32
    length: I32
    known: I32
    computed: I32
    written: I32
    limit: I32
    stop: I32
    tail: I32
    tail_block: I32
    turn: I32
    cached: I32
    born: I32
    edits: I32
    logprobs: I32
    scored: I32
    params: I32

    def __init__(self, columns: Columns) -> None:
        self._owned: set[str] = set()
        self.seq, self.length, self.known = columns.seq, columns.length, columns.known
        self.computed, self.written, self.limit = columns.computed, columns.written, columns.limit
        self.stop, self.tail, self.tail_block = columns.stop, columns.tail, columns.tail_block
        self.turn, self.cached, self.born = columns.turn, columns.cached, columns.born
        self.edits, self.logprobs, self.scored = columns.edits, columns.logprobs, columns.scored
        self.params = columns.params

    def own(self, name: str) -> npt.NDArray[Any]:
        """The column *name*, writable."""
        column = getattr(self, name)
        if name not in self._owned:
            column = column.copy()
            setattr(self, name, column)
            self._owned.add(name)
        return column

    def adopt(self, name: str, column: npt.NDArray[Any]) -> None:
        """Take *column*, which nobody else holds, for the column *name*."""
        setattr(self, name, column)
        self._owned.add(name)

    def clear(self, rows: Any) -> None:
        """Free *rows*."""
        self.own("seq")[rows] = -1
        for name in ("length", "known", "computed", "written"):
            self.own(name)[rows] = 0

    def freeze(self) -> Columns:
        """The columns as they are now, read-only."""
        for name in self._owned:
            getattr(self, name).setflags(write=False)
        return Columns(
            self.seq,
            self.length,
            self.known,
            self.computed,
            self.written,
            self.limit,
            self.stop,
            self.tail,
            self.tail_block,
            self.turn,
            self.cached,
            self.born,
            self.edits,
            self.logprobs,
            self.scored,
            self.params,
        )
