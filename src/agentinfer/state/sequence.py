"""The life of a sequence: one record type a stage, so that no field is ever meaningless."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from agentinfer.state.ids import BlockId, Row, SeqId
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.request import Request

FinishReason = Literal["stop", "length", "abort", "error", "rejected"]
Status = Literal["WAITING", "PREFILL", "DECODE", "FINISHED", "REJECTED", "ABORTED"]


Versions = tuple[tuple[int, int], ...]
"""Which weights sampled the tokens of a sequence: (position of the first of them, version), ascending."""
AT_FIRST: Versions = ((0, 0),)


def since(versions: Versions, position: int, version: int) -> Versions:
    """*versions*, from *position* on *version*."""
    return (*(one for one in versions if one[0] < position), (position, version))


@frozen
class Waiting:
    """Holds no row and no blocks."""

    seq: SeqId
    request: Request
    seed: int
    """The request's seed, or the one that was drawn for it."""
    tokens: tuple[int, ...]
    """The prompt, and what was generated before a preemption or a fork."""
    parent: SeqId
    """Whose blocks it may share at admission, if that one still runs. Its own id: nobody's."""
    cached: int = -1
    """Tokens of the prompt that need not be computed at its first admission; -1 before it."""
    versions: Versions = AT_FIRST


@frozen
class Running:
    """Holds a row and blocks. Its numbers are in Columns, at that row."""

    seq: SeqId
    request: Request
    seed: int
    row: Row
    tokens: tuple[tuple[int, ...], ...]
    """One tuple a full block of known tokens; the rest is in Columns.tail."""
    blocks: tuple[BlockId, ...]
    hashes: tuple[int, ...]
    """One a leading block that the prefix cache knows."""
    versions: Versions = AT_FIRST
    stale: bool = False
    """Some of its KV was computed with weights that are gone since: nobody else is to find or share any of it."""


def holding(run: Running, blocks: tuple[BlockId, ...]) -> Running:
    """*run* with the block table *blocks*."""
    return Running(run.seq, run.request, run.seed, run.row, run.tokens, blocks, run.hashes, run.versions, run.stale)


def again(run: Running, tokens: tuple[int, ...], cached: int) -> Waiting:
    """*run*, of which these *tokens* are known, as it waits once more."""
    return Waiting(run.seq, run.request, run.seed, tokens, run.seq, cached, run.versions)


@frozen
class Finished:
    """Holds nothing but its tokens."""

    seq: SeqId
    request: Request
    tokens: tuple[int, ...]
    """Prompt and output."""
    reason: FinishReason
    detail: str = ""
    """The stop token's id, the stop string, or what went wrong."""
    cached: int = 0
    """Prompt tokens that the prefix cache, or the parent of a fork, had when it was first admitted."""
    matched: str | None = None
    """The stop string in the text of its tokens that ended it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of its output, where that was asked for; the loop adds them, for no state holds them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Likewise of its prompt; None for the first token, and for those that were never computed."""
    versions: Versions = AT_FIRST

    @property
    def output(self) -> tuple[int, ...]:
        """The generated tokens, an end or stop token included."""
        return self.tokens[len(self.request.prompt) :]
