"""Books: who was admitted when, how far each sequence is, and what a policy promised. Kept from plans alone."""

from __future__ import annotations

from typing import Any, cast

import attrs
import numpy as np
from attrs import define, field, frozen

from agentinfer.state.engine import EngineState
from agentinfer.state.ids import SeqId, cdiv, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Plan
from agentinfer.state.sequence import Waiting
from agentinfer.testing.ghost import Fault, Script
from agentinfer.testing.ledger import Ledger, contents, reusable
from agentinfer.testing.oracle import limit


@frozen
class Promises:
    """What a policy claims beyond what `schedule` guarantees for all. Claim nothing, and nothing is checked."""

    never_preempts: bool = False
    """Once admitted, a sequence runs to its end: blocks for all of it can always be had."""
    unmixed: bool = False
    """No step holds both prompts and decodes, and prompts go first."""
    newest_first: bool = False
    """Who is preempted is newer than who stays."""
    patient: bool = False
    """A running row is left out of at most ceil(max_num_seqs / max_num_batched_tokens) - 1 steps in a row."""
    in_order: bool = False
    """Who waits is admitted in order: the preempted and forked, oldest first, then the others as they came."""
    busy: bool = False
    """As long as a running row could do more, the budget is used up."""


def same_plan(one: Any, other: Any) -> str:
    """The name of the first field in which two plans differ; empty if they are equal."""
    kind = cast(Any, type(one))
    if kind is np.ndarray and type(other) is np.ndarray:
        return "" if one.dtype == other.dtype and np.array_equal(one, other) else "array"
    if not attrs.has(kind) or type(other) is not kind:
        return "" if one == other else "value"
    for name in attrs.fields_dict(kind):
        if same_plan(getattr(one, name), getattr(other, name)):
            return name
    return ""


def _awaits_parent(before: EngineState, waiting: Waiting, admitted: set[int]) -> bool:
    """Whether *waiting* is a fork whose parent waits too, is *admitted* now, or has not landed what they share."""
    for run in before.rows:
        if run is not None and run.seq == waiting.parent:
            return before.cols.written[run.row] < len(waiting.tokens) - 1
    queued = {w.seq for w in (*before.requeued, *before.waiting)}
    return waiting.parent != waiting.seq and (waiting.parent in queued or waiting.parent in admitted)


@define(eq=False)
class Books:
    """The history of every sequence since its last admission. Mutable on purpose."""

    limits: Limits
    promises: Promises
    scripts: dict[SeqId, Script]
    admitted: dict[SeqId, int] = field(factory=dict[SeqId, int])
    """Running sequence -> step of the plan that admitted it."""
    done: dict[SeqId, int] = field(factory=dict[SeqId, int])
    """Running sequence -> positions computed, those in flight included."""
    found: dict[SeqId, int] = field(factory=dict[SeqId, int])
    """Positions that need not be computed at a sequence's first admission."""
    hungry: dict[SeqId, int] = field(factory=dict[SeqId, int])
    """Steps in a row that left it out although it could run."""
    parents: dict[SeqId, SeqId] = field(factory=dict[SeqId, SeqId])
    last_step: int = -1

    def took_part(self, seq: SeqId, plan: Plan) -> bool:
        """Whether *plan* ran *seq* since its last admission."""
        return seq in self.admitted and self.admitted[seq] <= plan.step

    def left(self, seq: SeqId) -> None:
        """*seq* does not run any more."""
        for book in (self.admitted, self.done, self.hungry):
            book.pop(seq, None)

    def restart(self, found: dict[SeqId, int]) -> None:
        """Nobody runs any more, and *found* is how it was at the moment gone back to."""
        for seq in list(self.admitted):
            self.left(seq)
        self.found = dict(found)

    def planned(self, before: EngineState, after: EngineState, plan: Plan, ledger: Ledger, flight: Plan | None) -> None:
        """Hold *plan*, made from *before* while *flight* had not landed, against the books; then write it into them."""
        self._nobody_lost(before, after)
        if plan.step <= self.last_step:
            raise Fault(f"step {plan.step} comes after step {self.last_step}: a plan in flight could be taken for it")
        self.last_step = plan.step
        needs = {seq: self._need(seq, flight) for seq in self.done}
        self._keeps_promises(before, after, plan, needs)
        for seq in plan.preempted:
            if seq not in self.admitted:
                raise Fault(f"step {plan.step} preempts sequence {seq}, which does not run")
            self.left(seq)
        self._hunger(plan, needs)
        admitted = {seq for seq in ints(plan.seqs) if seq not in self.done}
        queue = [w.seq for w in (*before.requeued, *before.waiting) if not _awaits_parent(before, w, admitted)]
        if self.promises.in_order and admitted != set(queue[: len(admitted)]):
            raise Fault(f"step {plan.step} admits {sorted(admitted)} of those that wait, in order: {queue}")
        self._judges_rightly(plan)
        for seq, start, end in zip(ints(plan.seqs), ints(plan.start), ints(plan.context), strict=True):
            script = self.scripts[SeqId(seq)]
            if script.seq in self.done:
                if start != self.done[script.seq]:
                    raise Fault(
                        f"step {plan.step} computes sequence {seq} from {start}; it was at {self.done[script.seq]}"
                    )
            else:
                self._admission(after, script, start, ledger)
                self.admitted[script.seq] = plan.step
            self.done[script.seq] = end

    def drafted(self, after: EngineState, plan: Plan) -> None:
        """Note that *plan*, written down already, has drafts too: the rows have come further, until it lands."""
        for seq, end in zip(ints(plan.seqs), ints(plan.context), strict=True):
            self.done[SeqId(seq)] = end
        if self.promises.never_preempts:
            self._runs_to_its_end(after, plan)

    def taken_back(self, seq: SeqId) -> None:
        """Drafts of *seq* have landed: it has computed all that it knows, but for the last token."""
        self.done[seq] = self.scripts[seq].known - 1

    def _judges_rightly(self, plan: Plan) -> None:
        """What each request asks of its tokens, and of the tokens of its prompt, is what the plan wants."""
        asked = [self.scripts[SeqId(seq)].request for seq in ints(plan.seqs)]
        own = [asked[i].params.logprobs for i in ints(plan.sample_rows)]
        wanted = [None] * len(own) if plan.logprobs is None else [None if k < 0 else k for k in ints(plan.logprobs)]
        if own != wanted:
            raise Fault(f"step {plan.step} wants log-probabilities {wanted} of its samples; asked for were {own}")
        right: list[tuple[int, ...]] = []
        flat = 0
        for i, (start, end) in enumerate(zip(ints(plan.start), ints(plan.context), strict=True)):
            k = asked[i].params.prompt_logprobs
            stop = min(end, len(asked[i].prompt) - 1) if k is not None else start
            right += [(i, flat + p - start, p + 1, asked[i].prompt[p + 1], k or 0) for p in range(start, stop)]
            flat += end - start
        scored = plan.scored
        columns = () if scored is None else (scored.rows, scored.samples, scored.positions, scored.tokens, scored.top)
        found = list(zip(*map(ints, columns), strict=True)) if columns else []
        if found != right:
            raise Fault(f"step {plan.step} judges {found} of prompts, and should judge {right}")

    def _need(self, seq: SeqId, flight: Plan | None) -> int:
        """Positions that *seq* could compute now."""
        script = self.scripts[seq]
        promised = flight is not None and self.took_part(seq, flight) and seq in flight.seqs[flight.sample_rows]
        last = limit(self.limits, script.request) - 1
        return min(script.known + promised, last) - self.done[seq]

    def _nobody_lost(self, before: EngineState, after: EngineState) -> None:
        was, now = (sorted(_everyone(state)) for state in (before, after))
        if was != now:
            raise Fault(f"schedule made of sequences {was} sequences {now}")
        left = [w.seq for w in after.waiting]
        if left != [w.seq for w in before.waiting if w.seq in set(left)]:
            raise Fault(f"the queue was {[w.seq for w in before.waiting]} and became {left}")

    def _admission(self, after: EngineState, script: Script, start: int, ledger: Ledger) -> None:
        """Nothing that the cache has is computed again, and nothing that it has not is skipped."""
        salt, tokens = script.request.salt, script.tokens
        most = reusable(self.limits, set(ledger.known.values()), salt, tokens)
        least = reusable(self.limits, set(contents(after.pool).values()), salt, tokens) if ledger.exact else 0
        if script.request.params.prompt_logprobs is not None:
            most = least = 0
        ancestor = self.parents.get(script.seq)
        while ancestor is not None:  # a fork may share what a running ancestor has, the block under way included
            most = max(most, min(self.done.get(ancestor, 0), len(tokens) - 1))
            ancestor = self.parents.get(ancestor)
        if not least <= start <= most:
            raise Fault(
                f"sequence {script.seq} starts at {start} of {len(tokens)} tokens; the cache has {least} of them"
                + (f", or {most} before this step" if most != least else "")
            )
        self.found.setdefault(script.seq, start)

    def _hunger(self, plan: Plan, needs: dict[SeqId, int]) -> None:
        served = set(ints(plan.seqs))
        most = cdiv(self.limits.max_num_seqs, self.limits.max_num_batched_tokens) - 1
        for seq in self.done:
            self.hungry[seq] = 0 if seq in served or needs[seq] <= 0 else self.hungry.get(seq, 0) + 1
            if self.promises.patient and self.hungry[seq] > most:
                raise Fault(f"sequence {seq} was left out of {self.hungry[seq]} steps in a row; {most} were promised")

    def _keeps_promises(self, before: EngineState, after: EngineState, plan: Plan, needs: dict[SeqId, int]) -> None:
        if self.promises.never_preempts:
            self._runs_to_its_end(after, plan)
        if self.promises.unmixed:
            self._unmixed(plan, needs)
        if plan.preempted:
            self._preempts_rightly(before, plan, needs)
        if self.promises.busy and not plan.preempted:
            given = dict(zip(ints(plan.seqs), ints(plan.count), strict=True))
            wanting = [seq for seq, need in needs.items() if given.get(seq, 0) < need]
            if wanting and sum(given.values()) < self.limits.max_num_batched_tokens:
                raise Fault(f"step {plan.step} computes {given}; sequences {wanting} could do more")

    def _runs_to_its_end(self, after: EngineState, plan: Plan) -> None:
        if plan.preempted:
            raise Fault(f"step {plan.step} preempts {plan.preempted}")
        size = self.limits.block_size
        missing = [
            cdiv(limit(self.limits, run.request) - 1, size) - len(run.blocks) for run in after.rows if run is not None
        ]
        if sum(missing) > after.pool.num_available:
            raise Fault(f"the running sequences still need {missing} blocks, {after.pool.num_available} are to be had")

    def _unmixed(self, plan: Plan, needs: dict[SeqId, int]) -> None:
        """A row that computes, or could, more than one position is a prompt; one that can not, decodes."""
        prompts = [seq for seq, need in needs.items() if need > 1]
        prompts += [seq for seq, n in zip(ints(plan.seqs), ints(plan.count), strict=True) if n > 1 and seq not in needs]
        decodes = [seq for seq in ints(plan.seqs) if needs.get(SeqId(seq), 0) == 1 and self._has_sampled(SeqId(seq))]
        if prompts and decodes:
            raise Fault(f"step {plan.step} decodes {decodes}, while {prompts} are prompts")

    def _has_sampled(self, seq: SeqId) -> bool:
        return self.done.get(seq, 0) >= len(self.scripts[seq].request.prompt)

    def _preempts_rightly(self, before: EngineState, plan: Plan, needs: dict[SeqId, int]) -> None:
        ages = [run.seq for row in ints(before.order) if (run := before.rows[row]) is not None]
        stay = [seq for seq in ages if seq not in plan.preempted]
        if self.promises.newest_first and stay and max(map(ages.index, stay)) > min(map(ages.index, plan.preempted)):
            raise Fault(f"of sequences {ages}, oldest first, step {plan.step} preempts {plan.preempted}")
        size, budget = self.limits.block_size, self.limits.max_num_batched_tokens
        wanted = sum(
            cdiv(self.done[run.seq] + min(max(needs[run.seq], 0), budget), size) - len(run.blocks)
            for run in before.rows
            if run is not None
        )
        if wanted <= before.pool.num_available:
            raise Fault(f"step {plan.step} preempts {plan.preempted}; {wanted} blocks were wanted and to be had")


def _everyone(state: EngineState) -> list[SeqId]:
    waiting = [w.seq for w in (*state.requeued, *state.waiting)]
    return [*waiting, *(run.seq for run in state.rows if run is not None)]
