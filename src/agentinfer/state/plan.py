"""Plan: all that the device needs for one forward pass. Sampled and Output: what comes back."""

from __future__ import annotations

import marshal
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

from agentinfer.state.ids import F32, I32, I64, BlockId, Bool, Row, SeqId
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.request import Request, biased, needs_host, penalised
from agentinfer.state.sequence import Finished
from agentinfer.state.show import plan_html

TableEntries = tuple[Row, int, tuple[BlockId, ...]]
"""Block-table entries of a row: the row, the index of the first one, the blocks."""


@frozen(eq=False)
class SamplingColumns:
    """How to choose each sample of a step, one element a sample (S of them)."""

    params: npt.NDArray[Any]
    """[S] of columns.PARAMS."""
    index: I32
    """[S] output index: how many tokens this sequence had sampled before."""
    banned: tuple[tuple[int, tuple[int, ...]], ...]
    """(sample, token ids that it may not choose): end and stop tokens before `min_tokens`."""

    @property
    def temperature(self) -> F32:
        """[S] float32; below 1e-5 is greedy."""
        return self.params["temperature"]

    @property
    def top_p(self) -> F32:
        """[S] float32 in (0, 1]."""
        return self.params["top_p"]

    @property
    def min_p(self) -> F32:
        """[S] float32 in [0, 1]."""
        return self.params["min_p"]

    @property
    def top_k(self) -> I32:
        """[S] int32; 0 or less is off."""
        return self.params["top_k"]

    @property
    def seed(self) -> I64:
        """[S] int64."""
        return self.params["seed"]


@frozen
class Edit:
    """A sample whose logits are edited before temperature, as its request asks: see state.request.edits_logits."""

    sample: int
    row: Row
    seq: SeqId
    request: Request
    late: bool = field(init=False, default=Factory(lambda one: needs_host(one.request.params), takes_self=True))
    """Whether it waits for the host. Like the two that follow it is found once: steps in steady decode share edits."""
    bias: int = field(
        init=False, default=Factory(lambda one: one.row if biased(one.request.params) else -1, takes_self=True)
    )
    """The row, if a bias is added; else -1."""
    counts: int = field(
        init=False, default=Factory(lambda one: one.row if penalised(one.request.params) else -1, takes_self=True)
    )
    """The row, if penalties count its tokens; else -1."""


@frozen
class Told:
    """What the device has to know of a row whose logits are edited: told once, when the row is given."""

    row: Row
    request: Request
    tokens: tuple[int, ...]
    """Prompt and output, all of it known: no token of the row is in flight."""


@frozen(eq=False)
class Scored:
    """Positions of prompts whose next token is known, and is to be judged by their logits. N of them."""

    rows: I32
    """[N] index into the plan's `rows` of each."""
    samples: I32
    """[N] flat positions (of T), ascending; none of them is sampled."""
    positions: I32
    """[N] of the token to judge, in its sequence."""
    tokens: I32
    """[N] that token."""
    top: I32
    """[N] likeliest tokens wanted beside it."""


@frozen(eq=False)
class Plan:
    """One forward pass. R rows take part, T positions are computed, S of them are sampled.

    The positions of row i are `start[i] .. start[i] + count[i] - 1`, laid out one row after the other.
    """

    step: int
    base: int
    """The step of the plan that `tables` extends; -1: `tables` is complete."""
    rows: I32
    """[R] distinct."""
    seqs: I32
    """[R] SeqId of each row."""
    start: I32
    """[R] first position computed."""
    count: I32
    """[R] positions computed, at least 1."""
    context: I32
    """[R] keys that the row attends to: start + count."""
    slots: I64
    """[T] KV slot of each position: block * block_size + offset."""
    inputs: I32
    """[T] token id of each position; -1: the token that the row sampled in the step before, on the device."""
    samples: I32
    """[S] flat positions (of T) whose logits are wanted, ascending."""
    sample_rows: I32
    """[S] index into `rows` of each sample."""
    sampling: SamplingColumns
    tables: tuple[TableEntries, ...]
    """Block-table entries that the device does not have yet, to be applied in order."""
    copies: tuple[tuple[BlockId, BlockId], ...]
    """(source, target) blocks whose KV is copied before anything of this step is written."""
    preempted: tuple[SeqId, ...]
    edits: tuple[Edit, ...] = ()
    """Samples whose logits are edited, ascending; none of another sample of the same row."""
    told: tuple[Told, ...] = ()
    """Rows whose logits will be edited and that the device does not know yet, as with `tables`."""
    logprobs: I32 | None = None
    """[S] likeliest tokens wanted beside each sample; -1: not even its own log-probability. None: all are -1."""
    scored: Scored | None = None
    """What of prompts is to be judged; None: nothing."""
    drafts: tuple[int, ...] = ()
    """[R] how many of each row's positions, its last ones, are guesses (speculate.py); empty: none of any row."""

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan_digest(plan: Plan) -> str:
    """Name the plan by its content, in 8 hex digits: in a few microseconds, for ranks to compare at each step."""
    edits = [(edit.sample, edit.row, edit.seq) for edit in plan.edits]  # what a sequence asks, all ranks have heard
    told = [(told.row, told.tokens) for told in plan.told]
    facts = (plan.step, plan.base, plan.tables, plan.copies, plan.preempted, plan.sampling.banned, edits, told)
    parts = (plan.rows, plan.seqs, plan.start, plan.count, plan.context, plan.slots, plan.inputs, plan.samples)
    judged = [] if plan.scored is None else [plan.scored.samples, plan.scored.tokens]
    judged += [] if plan.logprobs is None else [plan.logprobs]
    arrays = (*parts, plan.sampling.params, plan.sampling.index, *judged)
    return f"{zlib.crc32(b''.join((marshal.dumps((*facts, plan.drafts), 0), *(x.tobytes() for x in arrays)))):08x}"


@frozen(eq=False)
class Sampled:
    """What one step sampled."""

    tokens: I32
    """[S] token ids."""
    row_offsets: I32
    """[R + 1] the samples of row i are tokens[row_offsets[i] : row_offsets[i + 1]]."""
    ok: Bool
    """[S] False: the logits were not finite; that sequence fails, the others go on."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """[S] of each token, None where the plan wants none; None at all: of none, or not known here."""
    scored: tuple[TokenLogprobs, ...] | None = None
    """[N] of the plan's `scored` tokens; None: there are none, or it is not known here."""


def offsets_of(plan: Plan) -> I32:
    """The `row_offsets` of *plan*'s samples. [R + 1] int32."""
    edges = np.arange(len(plan.rows) + 1, dtype=np.int32)
    if len(plan.samples) == len(plan.rows) == len(plan.slots):
        return edges  # one position and one sample a row
    return np.searchsorted(plan.sample_rows, edges).astype(np.int32)


def sampled(
    plan: Plan,
    tokens: Any,
    ok: Any = None,
    logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    scored: tuple[TokenLogprobs, ...] | None = None,
) -> Sampled:
    """*tokens* (one a sample of *plan*) as a Sampled."""
    ids = np.array(tokens, np.int32).reshape(-1)
    fine = np.ones(len(ids), np.bool_) if ok is None else np.asarray(ok, np.bool_)
    return Sampled(ids, offsets_of(plan), fine, logprobs, scored)


PromptLogprobs = tuple[SeqId, int, tuple[TokenLogprobs, ...]]
"""Of tokens of a prompt: the sequence, the position of the first of them, one record each."""


@frozen(eq=False)
class Output:
    """What one step gave to the outside. K tokens were accepted."""

    step: int
    seqs: I32
    """[K] SeqId of each token."""
    tokens: I32
    """[K] token ids."""
    finished: tuple[Finished, ...]
    """Sequences that ended since the output before, for whatever reason."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """[K] of each token; None for those whose request asks for none; None at all if nobody asks."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of pieces of prompts that this step computed."""
