"""Drive: an engine over the ghost device, in the order of `advance`, that checks every step it takes.

Any wrong step is a Fault, in words. Needs no Hypothesis, so that a plain test can use it too::

    drive = Drive(limits, throughput)
    seq = drive.arrive(Request((1, 2, 3), SamplingParams(max_tokens=4)))
    drive.drain()
    assert drive.over[seq].reason == "length"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
from attrs import define, evolve, field, frozen

from agentinfer.state.admit import abort, arrive, fail, fork, stop
from agentinfer.state.blocks import BlockHash, PoolDraft, block_hash
from agentinfer.state.check import violations
from agentinfer.state.commit import flush
from agentinfer.state.engine import EngineState, digest, find_waiting, has_work, initial
from agentinfer.state.event import Aborted, Arrived, Event, Failed, Forked, Landed, Stepped, Stopped
from agentinfer.state.history import Moment, replay, rewind
from agentinfer.state.ids import SeqId, cdiv, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Output, Plan
from agentinfer.state.policy import Policy
from agentinfer.state.request import Request
from agentinfer.state.schedule import rebase, schedule
from agentinfer.state.sequence import Finished, FinishReason
from agentinfer.state.speculate import Drafts, accept, drafts_of, room, speculate
from agentinfer.testing.books import Books, Promises, same_plan
from agentinfer.testing.ghost import Fault, GhostDevice, GhostFlight, Script, place_of
from agentinfer.testing.ledger import Content, Ledger
from agentinfer.testing.oracle import answer, limit, refused

Propose = Callable[[], Drafts]
"""Asked for guesses once a step is planned."""
_KEPT = 6
"""Old states kept, to see that they never change and to rewind to."""


def none() -> Drafts:
    """No guesses."""
    return {}


@frozen(eq=False)
class Snapshot:
    """A state of the past, its digest then, and what each of its live sequences had."""

    state: EngineState
    digest: str
    known: dict[SeqId, int]
    found: dict[SeqId, int]
    """Positions that the cache had of each sequence that had been admitted."""


@define(eq=False)
class Drive:
    """One engine, one ghost. Every method checks all it can and raises Fault. Mutable on purpose."""

    limits: Limits
    policy: Policy
    overlap: bool = False
    promises: Promises = field(factory=Promises)
    hasher: BlockHash = block_hash
    state: EngineState = field(init=False)
    name: str = field(init=False)
    """The digest of `state`."""
    ghost: GhostDevice = field(init=False)
    books: Books = field(init=False)
    ledger: Ledger = field(init=False)
    flight: GhostFlight | None = None
    over: dict[SeqId, Finished] = field(factory=dict[SeqId, Finished])
    """How each sequence ended, as the outputs told it."""
    due: dict[SeqId, tuple[FinishReason, tuple[int, ...]]] = field(
        factory=dict[SeqId, tuple[FinishReason, tuple[int, ...]]]
    )
    """Ends that no output has told yet."""
    events: list[Event] = field(factory=list[Event])
    digests: list[str] = field(factory=list[str])
    plans: list[Plan] = field(factory=list[Plan])
    snapshots: list[Snapshot] = field(factory=list[Snapshot])
    moments: Iterator[Moment] | None = None
    """The events replayed so far."""
    replayed: int = 0
    recorded: bool = True
    """The events lead from the first state to this one: nobody has rewound."""

    def __attrs_post_init__(self) -> None:
        self.state = initial(self.limits)
        self.name = digest(self.state)
        self.ghost = GhostDevice(self.limits)
        self.books = Books(self.limits, self.promises, self.ghost.scripts)
        self.ledger = Ledger(self.limits, exact=self.hasher is block_hash)

    @property
    def live(self) -> list[SeqId]:
        """Sequences that wait or run."""
        running = [run.seq for run in self.state.rows if run is not None]
        return sorted([*running, *(w.seq for w in (*self.state.requeued, *self.state.waiting))])

    def arrive(self, request: Request) -> SeqId:
        """A client asks for something; the first of its sequences."""
        state, first = arrive(self.state, request)
        for seq in (SeqId(first + j) for j in range(request.params.n)):
            if refused(self.limits, request):
                self.due[seq] = ("rejected", request.prompt)
                continue
            waiting = find_waiting(state, seq)
            if waiting is None or waiting.tokens != request.prompt:
                raise Fault(f"sequence {seq} was to wait; it is {waiting}")
            if seq > first:
                self.books.parents[seq] = first
            elif request.params.seed not in (None, waiting.seed):
                raise Fault(f"sequence {seq} asked for seed {request.params.seed} and has {waiting.seed}")
            right = answer(self.limits, waiting.request, waiting.seed, request.prompt)
            self.ghost.scripts[seq] = Script(seq, waiting.request, waiting.seed, right, len(request.prompt))
        seeds = {self.ghost.scripts[SeqId(first + j)].seed for j in range(request.params.n) if first not in self.due}
        if first not in self.due and len(seeds) < request.params.n:
            raise Fault(f"the {request.params.n} sequences from {first} on have the seeds {seeds}")
        self._note(Arrived(request), state)
        return first

    def abort(self, seq: SeqId) -> None:
        """A client loses interest, maybe too late."""
        if seq in self.live:
            self._end(seq, "abort")
        self._note(Aborted(seq, "gone"), abort(self.state, seq, "gone"))

    def stop(self, seq: SeqId, count: int) -> None:
        """A stop string is in the text of the first *count* tokens that *seq* generated; maybe it has ended since."""
        if seq in self.live:
            self._end(seq, "stop")
            script = self.ghost.scripts[seq]
            self.due[seq] = ("stop", script.tokens[: len(script.request.prompt) + count])
        self._note(Stopped(seq, count, "STOP"), stop(self.state, seq, count, "STOP"))

    def fork(self, seq: SeqId, seeds: Sequence[int | None]) -> tuple[SeqId, ...]:
        """Continue a live sequence in more ways."""
        state, children = fork(self.state, seq, len(seeds), seeds)
        parent = self.ghost.scripts[seq]
        for child, asked in zip(children, seeds, strict=True):
            waiting, seed = find_waiting(state, child), parent.seed if asked is None else asked
            if waiting is None or waiting.tokens != parent.tokens or waiting.seed != seed:
                raise Fault(f"sequence {child}, a fork of {seq} with seed {seed}, is {waiting}")
            right = answer(self.limits, waiting.request, seed, parent.tokens)
            self.ghost.scripts[child] = Script(child, waiting.request, seed, right, parent.known)
            self.books.parents[child] = seq
        self._note(Forked(seq, tuple(seeds)), state)
        return children

    def step(
        self, *, launch_fails: bool = False, land_fails: bool = False, bad: int | None = None, propose: Propose = none
    ) -> Output | None:
        """One turn of `advance`, or of `advance_speculative` with the drafts of *propose*.

        *launch_fails*, *land_fails*: the step launched, or the one landed, raises. *bad*: the sample of the
        landed step, counted around, whose logits are not finite.
        """
        flight, output, launched = self.flight, None, None
        if flight is not None and not self.overlap:
            output, flight, self.flight = self._settle(flight, bad, fails=land_fails), None, None
        plan = self._schedule(propose)
        if plan is not None:
            launched = self._launch(plan, fails=launch_fails)
        elif flight is None and has_work(self.state):
            raise Fault("there is work and nothing runs, but the policy serves nobody")
        if flight is not None:
            output = self._settle(flight, bad, fails=land_fails)
        if output is None:
            state, output = flush(self.state)
            self._set(state)
            self._told(output.finished if output is not None else ())
        self.flight = launched
        self._keep()
        return output

    def set_budget(self, max_num_batched_tokens: int) -> None:
        """Another budget from here on. No event says so: what follows is not replayed."""
        self.replay()
        self.recorded = False
        self.limits = evolve(self.limits, max_num_batched_tokens=max_num_batched_tokens)
        self.ghost.limits = self.books.limits = self.ledger.limits = self.limits
        self.books.hungry.clear()
        self._set(evolve(self.state, limits=self.limits))

    def rewind(self, back: int) -> None:
        """Go on from the *back*-th last kept state. Sequences that arrived since are forgotten.

        A step in flight stays in flight and lands into nothing: its rows are nobody's any more. The device
        keeps its newer KV and is told complete tables, because the plan it holds is not the one before.
        """
        self.replay()
        self.recorded = False
        old = self.snapshots[-1 - back % len(self.snapshots)]
        state = rewind(old.state, self.state)
        for seq, known in old.known.items():
            self.ghost.scripts[seq].known = known
            self.over.pop(seq, None)
        self.due.clear()
        self.books.restart(old.found)
        self._set(state)
        if sorted(old.known) != self.live:
            raise Fault(f"rewound to sequences {sorted(old.known)}, found {self.live}")
        self.ghost.holds = -2  # whatever the next plan extends, this device can not have it

    def drain(self) -> None:
        """Step until nothing is left, then check that nothing was lost."""
        left = sum(limit(self.limits, self.ghost.scripts[seq].request) for seq in self.live)
        turns = 10 + 4 * left * cdiv(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        while has_work(self.state) or self.flight is not None or self.state.ended:
            turns -= 1
            if turns < 0:
                raise Fault(f"sequences {self.live} do not come to an end")
            self.step()
        self.finish()

    def finish(self) -> None:
        """Nothing is live: all blocks can be had by one sequence, all ends are told, and the trace replays."""
        if self.live or self.due:
            raise Fault(f"sequences {self.live} are left, the ends of {sorted(self.due)} untold")
        blocks = PoolDraft(self.state.pool, self.limits.seed).take(self.limits.num_blocks)
        if sorted(blocks) != list(range(1, self.limits.num_blocks + 1)):
            raise Fault(f"of {self.limits.num_blocks} blocks only {sorted(blocks)} are to be had")
        for snapshot in self.snapshots:
            self._unchanged(snapshot)
        self.replay()

    def replay(self) -> None:
        """Live through the recorded events again: after each of them the digest must be the same."""
        if not self.recorded or self.hasher is not block_hash:
            return
        if self.moments is None:
            self.moments = replay(self.limits, self._recording(), self.policy)
            next(self.moments)
        for i in range(self.replayed, len(self.events)):
            if digest(next(self.moments).state) != self.digests[i]:
                raise Fault(f"the replay differs from event {i} on, {self.events[i]}")
        self.replayed = len(self.events)

    def _recording(self) -> Iterator[Event]:
        """The events as they come, without an end: `replay` goes on where it was."""
        for i in count():
            yield self.events[i]

    def _schedule(self, propose: Propose = none) -> Plan | None:
        before = self.state
        state, plan = schedule(before, self.policy, self.hasher)
        if digest(before) != self.name:
            raise Fault("schedule changed the state that it was given")
        if plan is None:
            if state is not before:
                raise Fault("schedule changed the state without a plan")
            return None
        again, plan_again = schedule(before, self.policy, self.hasher)
        if difference := same_plan(plan, plan_again):
            raise Fault(f"scheduling the same state twice gives plans that differ in {difference}")
        self.books.planned(before, state, plan, self.ledger, None if self.flight is None else self.flight.plan)
        self.ledger.observe(state, scheduled=True, preempted=bool(plan.preempted))
        drafts = propose()
        twice = digest(speculate(again, plan, drafts)[0])
        state, plan = self._speculate(state, plan, drafts)
        self._note(Stepped(drafts_of(plan)), state, observed=True)
        if self.name != twice:
            raise Fault("scheduling the same state twice gives different states")
        self.plans.append(plan)
        return plan

    def _speculate(self, state: EngineState, plan: Plan, drafts: Drafts) -> tuple[EngineState, Plan]:
        name = digest(state)
        wide_state, wide = speculate(state, plan, drafts)
        if digest(state) != name:
            raise Fault("speculate changed the state that it was given")
        given, asked = dict(drafts_of(wide)), room(state, plan)
        for seq, guesses in given.items():
            if len(guesses) > asked.get(seq, 0) or guesses != tuple(drafts[seq][: len(guesses)]):
                raise Fault(f"sequence {seq} has drafts {guesses} of {drafts[seq]}, and room for {asked.get(seq, 0)}")
        left = self.limits.max_num_batched_tokens - len(wide.slots)
        for seq, most in asked.items():  # who has fewer than it could is at the end of the budget, or of the blocks
            want = min(most, len(drafts.get(seq, ())))
            if len(given.get(seq, ())) < want and left and wide_state.pool.num_available:
                raise Fault(f"sequence {seq} has drafts {given.get(seq)} of {drafts[seq]}, with {left} positions left")
        if wide is not plan:
            self.books.drafted(wide_state, wide)
            self.ledger.observe(wide_state, scheduled=True)
        return wide_state, wide

    def _launch(self, plan: Plan, *, fails: bool) -> GhostFlight | None:
        based = rebase(self.state, plan, self.ghost.holds)
        if self.ghost.holds == plan.base and based is not plan:
            raise Fault(f"the device holds the tables of step {plan.base}; all of them were sent again")
        flight = self.ghost.launch(based, self.state, fails=fails)
        if flight is None:
            self._failed(plan)
        return flight

    def _failed(self, plan: Plan) -> None:
        seqs = tuple(SeqId(seq) for seq in ints(plan.seqs))
        for seq in set(seqs) & set(self.live):
            self._end(seq, "error")
        self._note(Failed(plan.step, seqs, "the device is gone"), fail(self.state, seqs, "the device is gone"))

    def _settle(self, flight: GhostFlight, bad: int | None, *, fails: bool) -> Output | None:
        plan = flight.plan
        if fails:
            self.ghost.spoil(plan)
            self._failed(plan)
            return None
        marks = () if bad is None or not len(plan.samples) else (bad % len(plan.samples),)
        result = self.ghost.land(flight, marks)
        before, name = self.state, self.name
        state, output = accept(before, plan, result, self.hasher)
        if digest(before) != name:
            raise Fault("accept changed the state that it was given")
        ended = set(self.due)
        learned = self._accept(plan, marks, output)
        failed = [self.ghost.scripts[seq] for seq, (reason, _) in self.due.items() if reason == "error"]
        broken = [(script.request.salt, script.tokens) for script in failed if script.seq not in ended]
        self._told(output.finished)
        self.ledger.observe(state, learned, broken, drafted=bool(plan.drafts))
        self._note(Landed(plan.step, tuple(ints(result.tokens)), marks), state, observed=True)
        if digest(accept(before, plan, result, self.hasher)[0]) != self.name:
            raise Fault("committing the same tokens twice gives different states")
        return output

    def _accept(self, plan: Plan, bad: tuple[int, ...], output: Output) -> set[Content]:
        """Count the tokens of *plan* as known; the contents whose KV has landed with it."""
        failed = {place_of(plan, i) for i in bad}
        sampling, drafts = set(ints(plan.sample_rows)), plan.drafts or (0,) * len(plan.rows)
        accepted: dict[int, list[int]] = {}
        learned: set[Content] = set()
        size = self.limits.block_size
        ends = ints(np.cumsum(plan.count))
        for i, (seq, context, n) in enumerate(zip(ints(plan.seqs), ints(plan.context), drafts, strict=True)):
            script = self.ghost.scripts[SeqId(seq)]
            if not self.books.took_part(script.seq, plan):
                continue
            salt, tokens = script.request.salt, script.answer.tokens
            guesses = ints(plan.inputs[ends[i] - n : ends[i]])
            for j, end in enumerate(range(context - n, context + 1)):  # one token after the other, as without drafts
                if (i, end - 1) in failed:
                    self._end(script.seq, "error")
                    break
                learned |= {(salt, tokens[:upto]) for upto in range(size, end + 1, size)}
                if i not in sampling:
                    break
                token = tokens[script.known]
                accepted.setdefault(seq, []).append(token)
                script.known += 1
                if script.known == len(tokens):
                    self._end(script.seq, script.answer.reason)
                    break
                if j < n and guesses[j] != token:
                    break
            if n and script.seq in self.books.done:
                self.books.taken_back(script.seq)
        given: dict[int, list[int]] = {}
        for seq, token in zip(ints(output.seqs), ints(output.tokens), strict=True):
            given.setdefault(seq, []).append(token)
        if given != accepted or output.step != plan.step:
            raise Fault(f"step {plan.step} gave tokens {given}; it should be {accepted}")
        return learned if self.limits.prefix_cache else set()

    def _end(self, seq: SeqId, reason: FinishReason) -> None:
        self.due[seq] = (reason, self.ghost.scripts[seq].tokens)
        self.books.left(seq)

    def _told(self, finished: Sequence[Finished]) -> None:
        for done in finished:
            if done.seq in self.over or done.seq not in self.due:
                raise Fault(f"sequence {done.seq} ended ({done.reason}), which was not due")
            if (done.reason, done.tokens) != self.due.pop(done.seq):
                script = self.ghost.scripts.get(done.seq)
                raise Fault(f"{done} should have ended as {script.answer if script else 'rejected'}")
            if done.reason == "stop" and done.detail != (done.matched or str(done.tokens[-1])):
                raise Fault(f"sequence {done.seq} was stopped by {done.tokens[-1]}; it says {done.detail!r}")
            if done.seq not in self.books.parents and done.cached != self.books.found.get(done.seq, 0):
                raise Fault(
                    f"{done.seq} found {self.books.found.get(done.seq, 0)} tokens cached; it says {done.cached}"
                )
            self.over[done.seq] = done
        if self.due:
            raise Fault(f"sequences {sorted(self.due)} ended, and no output says so")

    def _note(self, event: Event, state: EngineState, *, observed: bool = False) -> None:
        self._set(state, observed=observed)
        self.events.append(event)
        self.digests.append(self.name)

    def _set(self, state: EngineState, *, observed: bool = False) -> None:
        if state is not self.state:
            self.state, self.name = state, digest(state)
        if not observed:
            self.ledger.observe(state)
        if wrong := violations(state):
            raise Fault("; ".join(wrong))

    def _keep(self) -> None:
        known = {seq: self.ghost.scripts[seq].known for seq in self.live}
        self.snapshots = [*self.snapshots[-_KEPT:], Snapshot(self.state, self.name, known, dict(self.books.found))]
        self._unchanged(self.snapshots[self.state.step % len(self.snapshots)])

    @staticmethod
    def _unchanged(snapshot: Snapshot) -> None:
        if digest(snapshot.state) != snapshot.digest:
            raise Fault(f"the state before step {snapshot.state.step} has changed since")
