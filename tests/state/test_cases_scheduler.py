"""Faults that schedulers were found to have, one behaviour a test: exact numbers first, then the whole kind.

The model is a hash of the known tokens, the seed and the output index, and `Rig` checks every transition.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Collection, Sequence

import pytest
from attrs import define, evolve, field

from agentinfer.errors import InvalidRequest, InvalidSetting
from agentinfer.state.admit import abort, arrive, fits, limit_of, validate
from agentinfer.state.check import violations
from agentinfer.state.commit import commit, flush
from agentinfer.state.engine import EngineState, find_running, has_work, initial, status, tokens_of
from agentinfer.state.history import rewind
from agentinfer.state.ids import SeqId, cdiv, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Output, Plan, sampled
from agentinfer.state.policy import Policy, reserve, throughput
from agentinfer.state.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams
from agentinfer.state.schedule import schedule, scheduled
from agentinfer.state.sequence import Finished
from engines import BOTH, blocks_of, in_use, limits, ranges, request, sampling_steps

both_policies = pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.__name__)
both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["alone", "overlap"])


def choose(tokens: tuple[int, ...], seed: int, index: int, banned: Collection[int], vocab_size: int) -> int:
    """The model: a hash of all it can depend on, then the next token that is not banned."""
    word = hashlib.blake2b(repr((tokens, seed, index)).encode(), digest_size=8).digest()
    first = int.from_bytes(word, "little")
    return next(t for i in range(vocab_size) if (t := (first + i) % vocab_size) not in banned)


def alone(lim: Limits, asked: Request, seed: int | None = None) -> tuple[int, ...]:
    """What *asked* must get, from a loop that knows neither steps nor blocks."""
    params, out = asked.params, list(asked.prompt)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else lim.eos_ids)}
    while len(out) < limit_of(lim, asked):
        index = len(out) - len(asked.prompt)
        held = ends if index < params.min_tokens else ()
        out.append(choose(tuple(out), params.seed if seed is None else seed, index, held, lim.vocab_size))
        if out[-1] in ends:
            break
    return tuple(out[len(asked.prompt) :])


@define(eq=False)
class Rig:
    """An engine with at most *depth* steps planned before the first of them is committed. Mutable on purpose."""

    limits: Limits
    policy: Policy = throughput
    depth: int = 1
    state: EngineState = field(init=False)
    flights: list[Plan] = field(factory=list)
    plans: list[Plan] = field(factory=list)
    over: dict[int, Finished] = field(factory=dict)
    asked: dict[int, Request] = field(factory=dict)
    forced: dict[int, Sequence[int]] = field(factory=dict)
    born: dict[int, int] = field(factory=dict)
    """Step of the last admission."""
    calls: int = 0
    """Of schedule."""

    def __attrs_post_init__(self) -> None:
        self.state = initial(self.limits)

    def set(self, state: EngineState) -> None:
        self.state = state
        assert violations(state) == []

    def change(self, f: Callable[[EngineState], EngineState]) -> None:
        """Any transition outside of steps."""
        self.set(f(self.state))

    def arrive(self, asked: Request, forced: Sequence[int] = ()) -> SeqId:
        """Queue *asked*; its first tokens are *forced* wherever they are not banned."""
        state, seq = arrive(self.state, asked)
        assert seq not in self.asked
        self.asked[seq], self.forced[seq] = asked, forced
        self.set(state)
        return seq

    def abort(self, seq: int) -> None:
        self.change(lambda state: abort(state, SeqId(seq)))

    def preempt(self) -> None:
        """Send all that run back to wait, with the tokens that are known."""
        self.change(lambda state: rewind(state, state))

    def lower(self, budget: int) -> None:
        """Another budget from here on."""
        self.limits = evolve(self.limits, max_num_batched_tokens=budget)
        self.change(lambda state: evolve(state, limits=self.limits))

    def plan(self) -> Plan | None:
        before = self.state
        state, plan = schedule(before, self.policy)
        self.calls += 1
        if plan is None:
            assert state is before
            assert len(before.order) or not has_work(before), "work waits, nothing runs, and nothing is planned"
            return None
        self._look(before, state, plan)
        self.set(state)
        self.plans.append(plan)
        return plan

    def _look(self, before: EngineState, state: EngineState, plan: Plan) -> None:
        """Budget, order of admission, ranges, slots, inputs and sampling of *plan*, from first principles."""
        size, samples = self.limits.block_size, ints(plan.samples)
        assert sum(ints(plan.count)) == len(plan.slots) == len(plan.inputs) <= state.limits.max_num_batched_tokens
        queue = [w.seq for w in (*before.requeued, *before.waiting)]
        entered = [seq for seq in ints(plan.seqs) if seq in queue]
        assert set(entered) == set(queue[: len(entered)]), "somebody jumped the queue"
        at, wanted, slots, inputs = 0, [], ints(plan.slots), ints(plan.inputs)
        for i, (seq, (first, last)) in enumerate(scheduled(plan).items()):
            run = find_running(state, seq)
            assert run is not None
            if seq in entered:
                self.born[seq] = plan.step
            else:
                assert first == before.cols.computed[run.row]
            assert 0 <= first < last <= state.cols.length[run.row]
            assert len(run.blocks) == cdiv(last, size), "a block early or late"
            known = tokens_of(state, seq)
            assert last <= len(known) + 1
            end = at + last - first
            assert slots[at:end] == [run.blocks[p // size] * size + p % size for p in range(first, last)]
            assert inputs[at:end] == [known[p] if p < len(known) else -1 for p in range(first, last)]
            at = end
            if last >= len(known):
                wanted.append(at - 1)
                self._look_sample(plan, i, len(wanted) - 1, last)
        assert samples == wanted, "samples are of last positions only"

    def _look_sample(self, plan: Plan, row: int, sample: int, length: int) -> None:
        asked = self.asked[int(plan.seqs[row])]
        index = length - len(asked.prompt)
        assert ints(plan.sample_rows)[sample] == row
        assert plan.sampling.index[sample] == index, "the output index continues, whatever happened before"
        assert asked.params.seed in (None, plan.sampling.seed[sample])
        ends = {*asked.params.stop_token_ids, *(() if asked.params.ignore_eos else self.limits.eos_ids)}
        held = ends if index < asked.params.min_tokens else set()
        assert set(dict(plan.sampling.banned).get(sample, ())) == held

    def token(self, plan: Plan, sample: int) -> int:
        """The token of a *sample*; rubbish if its sequence has left, or was admitted again, since *plan*."""
        row = int(plan.sample_rows[sample])
        seq, length = SeqId(int(plan.seqs[row])), int(plan.context[row])
        if find_running(self.state, seq) is None or self.born[seq] > plan.step:
            return self.limits.vocab_size + 7
        known = tokens_of(self.state, seq)
        assert len(known) == length
        banned, index = dict(plan.sampling.banned).get(sample, ()), length - len(self.asked[seq].prompt)
        forced = self.forced[seq][index : index + 1]
        if forced and forced[0] not in banned:
            return forced[0]
        return choose(known, int(plan.sampling.seed[sample]), index, banned, self.limits.vocab_size)

    def land(self) -> Output:
        plan = self.flights.pop(0)
        tokens = [self.token(plan, i) for i in range(len(plan.samples))]
        state, output = commit(self.state, plan, sampled(plan, tokens))
        self.set(state)
        self.told(output)
        return output

    def told(self, output: Output) -> None:
        assert all(token < self.limits.vocab_size for token in ints(output.tokens)), "a token of one who left"
        for done in output.finished:
            assert done.seq not in self.over
            self.over[done.seq] = done

    def step(self) -> Output | None:
        """Plan a step, and commit one if that is all there is to do or *depth* of them are under way."""
        plan = self.plan()
        if plan is not None:
            self.flights.append(plan)
        if self.flights and (plan is None or len(self.flights) == self.depth):
            return self.land()
        state, output = flush(self.state)
        self.set(state)
        if output is not None:
            self.told(output)
        return output

    def settle(self) -> None:
        """Commit all that is under way."""
        while self.flights:
            self.land()

    def run(self, most: int = 2000) -> None:
        """Step until nothing is left: every block and row is free again."""
        for _ in range(most):
            if not (has_work(self.state) or self.flights or self.state.ended):
                break
            self.step()
        assert not has_work(self.state), f"still at work after {most} steps"
        assert self.state.pool.num_available == self.limits.num_blocks
        assert in_use(self.state) == 0
        assert set(self.over) == set(self.asked)

    def output(self, seq: int) -> tuple[int, ...]:
        return self.over[seq].output

    def right(self, seq: int) -> tuple[int, ...]:
        """What *seq* would have got alone."""
        return alone(self.limits, self.asked[seq])


# ---------------------------------------------------------------------------------------------- what can never fit


@both_policies
@both_depths
@pytest.mark.parametrize("cache", [True, False])
def test_sch_01_what_does_not_fit_the_pool_is_rejected_and_blocks_nobody(policy, depth: int, cache: bool) -> None:
    """Of four requests for 43, 32, 33 and 8 slots of a pool of 32, two are rejected and two answered in 12 calls."""
    rig = Rig(limits(num_blocks=8, max_num_batched_tokens=64, max_model_len=64, prefix_cache=cache), policy, depth)
    r1, r2, r3, r4 = (rig.arrive(request(p, g)) for p, g in ((40, 4), (30, 3), (30, 4), (5, 4)))
    for seq, slots in ((r1, 43), (r3, 33)):
        assert status(rig.state, seq) == "REJECTED"
        with pytest.raises(InvalidRequest, match=rf"needs {slots} KV slots; the pool has 32") as caught:
            validate(rig.limits, rig.asked[seq])
        assert caught.value.field == "max_tokens"
    rig.run(100)
    assert [rig.over[seq].reason for seq in (r1, r2, r3, r4)] == ["rejected", "length", "rejected", "length"]
    assert [len(rig.output(seq)) for seq in (r1, r2, r3, r4)] == [0, 3, 0, 4]
    assert all(rig.output(seq) == rig.right(seq) for seq in (r2, r4))
    assert rig.calls <= 12


@both_policies
@both_depths
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_sch_01_exactly_the_pool_is_enough(policy, depth: int, size: int) -> None:
    """prompt + max_tokens - 1 slots are needed: served if the pool has as many, rejected if it has one less."""
    for blocks, wanted in itertools.product((1, 2, 5), (1, 2, 7)):
        prompt = blocks * size + 1 - wanted
        if prompt < 1:
            continue
        rig = Rig(limits(block_size=size, num_blocks=blocks, max_model_len=128), policy, depth)
        seqs = [rig.arrive(request(prompt, n)) for n in (wanted, wanted + 1, wanted)]
        rig.run()
        assert [rig.over[seq].reason for seq in seqs] == ["length", "rejected", "length"]
        assert [len(rig.output(seq)) for seq in seqs] == [wanted, 0, wanted]
        assert rig.output(seqs[0]) == rig.output(seqs[2]) == rig.right(seqs[0])


# -------------------------------------------------------------------------------------------------- nobody starves


@both_depths
@pytest.mark.parametrize("cache", [True, False])
def test_sch_03_a_decode_gets_a_token_in_every_step(depth: int, cache: bool) -> None:
    """Under throughput, budget 8, thirty tokens take thirty steps though each of sixty brings a prompt of forty."""
    rig = Rig(limits(max_num_batched_tokens=8, prefix_cache=cache), throughput, depth)
    seq = rig.arrive(request((5,), 30))
    rig.step()
    for i in range(60):
        rig.arrive(request([(i * 41 + j) % 900 for j in range(40)]))
        rig.step()
    assert sampling_steps(rig.plans, seq) == list(range(30))
    assert all(len(plan.slots) == 8 for plan in rig.plans[1:])
    assert rig.output(seq) == rig.right(seq)


@both_depths
@pytest.mark.parametrize(("rows", "budget", "most"), [(4, 8, 0), (8, 8, 0), (9, 8, 1), (8, 3, 2), (8, 2, 3)])
def test_sch_03_the_gap_is_the_documented_one(depth: int, rows: int, budget: int, most: int) -> None:
    """Between two tokens of a row lie at most ceil(max_num_seqs / max_num_batched_tokens) - 1 steps without one."""
    rig = Rig(limits(num_blocks=64, max_num_seqs=rows), throughput, depth)
    seqs = [rig.arrive(request((i + 1, 2), 10 + i)) for i in range(rows)]
    rig.step()
    rig.lower(budget)
    for i in range(17 * (most + 1)):
        rig.arrive(request([(i * 41 + j) % 900 for j in range(40)]))
        rig.step()
    gaps = set()
    for seq in seqs:
        assert rig.output(seq) == rig.right(seq)
        gaps |= {b - a - 1 for a, b in itertools.pairwise(sampling_steps(rig.plans, seq))}
    assert max(gaps) == most == cdiv(rows, budget) - 1


@both_depths
def test_sch_03_reserve_lets_prompts_go_first(depth: int) -> None:
    """Under reserve the decode waits as long as prompts are there, is never mixed with them, and ends after them."""
    rig = Rig(limits(num_blocks=32, max_num_batched_tokens=8), reserve, depth)
    seq = rig.arrive(request((5,), 30))
    rig.step()
    for i in range(20):
        rig.arrive(request([(i * 41 + j) % 900 for j in range(40)]))
        rig.step()
    rig.run()
    assert rig.output(seq) == rig.right(seq)
    first, *rest = sampling_steps(rig.plans, seq)
    assert first == 0
    assert rest == list(range(rest[0], rest[0] + 29))
    assert all(len(rig.plans[step].seqs) == 1 for step in rest)


# ----------------------------------------------------------------------------------------------- what a step costs


@both_policies
@both_depths
@pytest.mark.parametrize(("rows", "budget"), [(6, 4), (6, 1), (7, 3), (3, 3), (4, 9)])
def test_sch_05_decodes_are_charged_and_take_turns(policy, depth: int, rows: int, budget: int) -> None:
    """The budget lowered under running decodes, each gets a token in any ceil(rows / budget) steps, and all end."""
    rig = Rig(limits(num_blocks=32, max_num_seqs=rows), policy, depth)
    seqs = {rig.arrive(request((i + 1,), 16)) for i in range(rows)}
    rig.step()
    rig.lower(budget)
    window = cdiv(rows, budget)
    for _ in range(2 * window + 1):
        rig.step()
    served = [set(ints(plan.seqs)) for plan in rig.plans[1:]]
    assert [len(plan.slots) for plan in rig.plans[1:]] == [min(rows, budget)] * (2 * window + 1)
    for i in range(len(served) - window + 1):
        assert set().union(*served[i : i + window]) == seqs
    rig.run()
    assert all(rig.output(seq) == rig.right(seq) for seq in seqs)


@both_depths
def test_sch_05_a_chunk_is_what_the_decodes_leave(depth: int) -> None:
    """Beside three decodes and with a budget of 8, fourteen tokens run as [0,5), [5,10), [10,14), sampled once."""
    rig = Rig(limits(max_num_batched_tokens=8), throughput, depth)
    for i in range(3):
        rig.arrive(request((i + 1,), 20))
    rig.step()
    seq = rig.arrive(request(14))
    rig.run()
    assert ranges(rig.plans, seq) == [(0, 5), (5, 10), (10, 14)]
    assert sampling_steps(rig.plans, seq) == [3]
    assert [len(plan.slots) for plan in rig.plans[1:4]] == [8, 8, 7]


@both_depths
@pytest.mark.parametrize("size", [1, 4, 16])
def test_sch_05_every_chunk_is_what_the_decodes_leave(depth: int, size: int) -> None:
    """Beside k decodes a prompt runs in chunks of budget - k whatever the block size, and its last one is sampled."""
    for decodes, left, length in itertools.product((0, 1, 4), (1, 3, 8), (1, 9)):
        rig = Rig(
            limits(block_size=size, num_blocks=160 // size, max_num_batched_tokens=decodes + left), throughput, depth
        )
        for i in range(decodes):
            rig.arrive(request((i + 1,), 30))
        if decodes:
            rig.step()
        before, seq = len(rig.plans), rig.arrive(request(length))
        for _ in range(cdiv(length, left) + 2):
            rig.step()
        spans = [(start, min(start + left, length)) for start in range(0, length, left)]
        assert ranges(rig.plans, seq) == spans
        assert sampling_steps(rig.plans, seq) == [before + len(spans) - 1]


CHUNKS = {  # (tokens, budget, cached): (start, count, sampled) of every step
    (10, 4, 0): [(0, 4, False), (4, 4, False), (8, 2, True)],
    (8, 4, 0): [(0, 4, False), (4, 4, True)],
    (9, 4, 0): [(0, 4, False), (4, 4, False), (8, 1, True)],
    (9, 4, 8): [(8, 1, True)],
    (5, 5, 0): [(0, 5, True)],
    (6, 5, 0): [(0, 5, False), (5, 1, True)],
    (1, 4, 0): [(0, 1, True)],
}


@both_policies
@both_depths
@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_sch_05_the_table_of_chunks(policy, depth: int, size: int, case: tuple[int, int, int]) -> None:
    """A prompt alone is cut into these chunks, for every block size, and only the last of them is sampled."""
    length, budget, cached = case
    rig = Rig(limits(block_size=size, num_blocks=16, max_num_batched_tokens=budget), policy, depth)
    if cached:
        rig.arrive(request(range(cached)))
        rig.run()
    before, seq = len(rig.plans), rig.arrive(request(range(length)))
    rig.run()
    seen = [(int(plan.start[0]), int(plan.count[0]), bool(len(plan.samples))) for plan in rig.plans[before:]]
    assert seen == CHUNKS[case]
    assert rig.over[seq].cached == cached


# ------------------------------------------------------------------------------------------ longer than the budget


@both_policies
@both_depths
@pytest.mark.parametrize(
    ("length", "spans"),
    [(8, [(0, 8)]), (9, [(0, 8), (8, 9)]), (31, [(0, 8), (8, 16), (16, 24), (24, 31)])],
)
def test_sch_07_a_prompt_longer_than_the_budget_is_chunked(policy, depth: int, length: int, spans) -> None:
    """With a budget of 8 and a context of 32, prompts of 8, 9 and 31 tokens take 1, 2 and 4 steps."""
    rig = Rig(limits(max_num_batched_tokens=8, max_model_len=32), policy, depth)
    seq = rig.arrive(request(length))
    rig.run()
    assert ranges(rig.plans, seq) == spans
    assert rig.output(seq) == rig.right(seq)
    with pytest.raises(InvalidRequest, match="max_model_len 32"):
        validate(rig.limits, request(32))


@both_policies
@both_depths
def test_sch_07_a_budget_of_one_is_a_token_a_step(policy, depth: int) -> None:
    """With a budget of 1 every step computes one position, and prompts of 8, 9 and 31 tokens are all answered."""
    rig = Rig(limits(max_num_batched_tokens=1, max_model_len=32), policy, depth)
    seqs = [rig.arrive(request(length)) for length in (8, 9, 31)]
    rig.run()
    assert [len(plan.slots) for plan in rig.plans] == [1] * (8 + 9 + 31)
    assert all(rig.output(seq) == rig.right(seq) for seq in seqs)


@pytest.mark.parametrize("setting", ["max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None, "8"])
def test_sch_07_a_size_that_can_not_work_is_refused_by_name(setting: str, bad) -> None:
    """A size below one, or no integer, fails at construction and on every change, naming the setting."""
    with pytest.raises(InvalidSetting) as caught:
        limits(**{setting: bad})
    assert caught.value.field == setting
    with pytest.raises(InvalidSetting, match=setting):
        evolve(limits(), **{setting: bad})


@both_policies
@both_depths
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_sch_07_more_rows_than_budget(policy, depth: int, budget: int) -> None:
    """With max_num_seqs above the budget all seven sequences are answered, none of them differently."""
    rig = Rig(limits(max_num_seqs=7, max_num_batched_tokens=budget, max_model_len=32), policy, depth)
    seqs = [rig.arrive(request((i + 1, *range(i)), 4)) for i in range(7)]
    rig.run()
    assert all(rig.output(seq) == rig.right(seq) for seq in seqs)


# ------------------------------------------------------------------------------------------------------- one token


@both_policies
@both_depths
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_sch_08_one_token_is_one_step(policy, depth: int, size: int, length: int) -> None:
    """max_tokens 1 beside others that decode: one token, ceil(prompt / block) blocks, and gone with its commit."""
    rig = Rig(limits(block_size=size, prefix_cache=False), policy, depth)
    others = [rig.arrive(request((i + 9,), 20)) for i in range(2)]
    rig.step()
    rig.settle()
    held, seq = in_use(rig.state), rig.arrive(request(length))
    plan = rig.plan()
    assert plan is not None
    assert scheduled(plan)[seq] == (0, length)
    assert len(blocks_of(rig.state, seq)) == cdiv(length, size)
    rig.flights.append(plan)
    if depth == 2:
        later = rig.plan()
        assert later is not None
        assert seq not in ints(later.seqs)
        rig.flights.append(later)
    output = rig.land()
    assert [(done.seq, done.reason, done.output) for done in output.finished] == [(seq, "length", rig.right(seq))]
    assert sorted(run.seq for run in rig.state.rows if run is not None) == others
    assert in_use(rig.state) <= held + len(others) * 2
    rig.settle()
    assert in_use(rig.state) == sum(len(blocks_of(rig.state, other)) for other in others)
    rig.run()
    assert sampling_steps(rig.plans, seq) == [plan.step]
    assert all(rig.output(other) == rig.right(other) for other in others)


def test_sch_08_a_prompt_of_four_uses_one_block() -> None:
    """In a pool of one block of 4, prompts of 3 and 4 tokens get their one token; one of 5 is rejected."""
    rig = Rig(limits(num_blocks=1))
    seqs = [rig.arrive(request(length)) for length in (3, 4, 5)]
    rig.run()
    assert [rig.over[seq].reason for seq in seqs] == ["length", "length", "rejected"]
    assert [len(rig.output(seq)) for seq in seqs] == [1, 1, 0]


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, 2**31])
def test_sch_08_no_tokens_is_no_request(bad) -> None:
    """max_tokens 0, negative, too large or no integer is an InvalidRequest that names it."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=bad)
    assert caught.value.field == "max_tokens"


# --------------------------------------------------------------------------------------------------- empty prompts


@both_policies
@both_depths
@pytest.mark.parametrize("place", [0, 1, 2])
def test_sch_09_an_empty_prompt_is_rejected_alone(policy, depth: int, place: int) -> None:
    """Of a batch of three the empty prompt is rejected, naming it, and the others and those who follow are served."""
    prompts = [(1, 2), (3,)]
    prompts.insert(place, ())
    rig = Rig(limits(), policy, depth)
    seqs = [rig.arrive(request(prompt, 3)) for prompt in prompts]
    with pytest.raises(InvalidRequest, match="prompt: has no tokens") as caught:
        validate(rig.limits, rig.asked[seqs[place]])
    assert caught.value.field == "prompt"
    rig.run()
    assert [rig.over[seq].reason for seq in seqs] == ["rejected" if i == place else "length" for i in range(3)]
    assert "prompt" in rig.over[seqs[place]].detail
    follower = rig.arrive(request((1, 2), 3))
    rig.run()
    assert rig.output(follower) == rig.right(follower)
    assert all(rig.output(seq) == rig.right(seq) for i, seq in enumerate(seqs) if i != place)


# ---------------------------------------------------------------------------------------------------- who is meant


@both_policies
@both_depths
def test_sch_10_equal_requests_are_two_sequences(policy, depth: int) -> None:
    """Twenty equal requests, some while the first runs and some after, get twenty numbers and equal answers."""
    rig = Rig(limits(max_num_seqs=3), policy, depth)
    seqs = []
    for i in range(20):
        seqs.append(rig.arrive(request((1, 2, 3, 4, 5), 6)))
        if i == 15:
            rig.run()
        rig.step()
    rig.run()
    assert seqs == list(range(20))
    assert {rig.output(seq) for seq in seqs} == {rig.right(0)}


@both_policies
@both_depths
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_sch_10_an_abort_means_one_sequence(policy, depth: int, steps: int, late: bool) -> None:
    """Asked again before or after the first one's abort, in whatever state that is, the second is served in full."""
    rig = Rig(limits(max_num_seqs=1, max_num_batched_tokens=4), policy, depth)
    asked = request((1, 2, 3, 4, 5, 6), 5)
    old = rig.arrive(asked)
    for _ in range(steps):
        rig.step()
    if late:
        new = rig.arrive(asked)
        rig.abort(old)
    else:
        rig.abort(old)
        new = rig.arrive(asked)
    while rig.flights or has_work(rig.state) or rig.state.ended:
        rig.step()
        rig.abort(old)
    rig.run()
    assert new != old
    assert rig.output(new) == rig.right(new)
    assert rig.over[old].reason == "abort"
    assert rig.output(old) == rig.right(new)[: len(rig.output(old))]


def test_sch_10_an_abort_of_nobody_changes_nothing() -> None:
    """Numbers that were never given, have ended or are negative leave the very same state."""
    rig = Rig(limits())
    done = rig.arrive(request(3))
    rig.run()
    rig.arrive(request(5, 9))
    rig.step()
    for seq in (done, -1, 0, 99):
        assert abort(rig.state, SeqId(seq)) is rig.state


# ------------------------------------------------------------------------------------------------------- the queue


@both_policies
@both_depths
def test_sch_12_first_come_first_served(policy, depth: int) -> None:
    """A big request that must wait is waited for: the small ones stay behind it, and it enters as soon as it fits."""
    rig = Rig(limits(max_num_seqs=2, num_blocks=8, max_model_len=33), policy, depth)
    rig.arrive(request(16, 9))
    rig.step()
    queue = [rig.arrive(request(24)), rig.arrive(request(3)), rig.arrive(request(2))]
    while len(rig.plans) < 9:
        assert [w.seq for w in rig.state.waiting] == queue
        assert not fits(rig.state, rig.state.waiting.peek(), reserve=policy is reserve)
        rig.step()
    rig.run()
    assert [sampling_steps(rig.plans, seq) for seq in queue] == [[9], [9], [10]]


@both_policies
@both_depths
def test_sch_12_those_who_left_take_no_place(policy, depth: int) -> None:
    """Fifty times two are aborted, queued, half-prefilled or running; two newcomers run in the next step each time."""
    rig = Rig(limits(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=8), policy, depth)
    for i in range(50):
        pair = [rig.arrive(request((i + 1, 2, 3, 4, 5, 6), 9)) for _ in range(2)]
        for _ in range(i % 5):
            rig.step()
        for seq in pair:
            rig.abort(seq)
        news = [rig.arrive(request((i + 1, 7))) for _ in range(2)]
        rig.step()
        assert ints(rig.plans[-1].seqs) == news
        rig.run()
    assert all(rig.output(seq) == rig.right(seq) for seq, done in rig.over.items() if done.reason == "length")


@both_policies
@both_depths
@pytest.mark.parametrize("size", [1, 4])
def test_sch_12_random_arrivals_and_aborts(policy, depth: int, size: int) -> None:
    """Over a random walk nobody jumps the queue, nothing stalls, and who is not aborted gets the right tokens."""
    dice = random.Random(17 * size + depth)
    rig = Rig(limits(block_size=size, num_blocks=32 // size, max_num_seqs=3, max_num_batched_tokens=6), policy, depth)
    gone = set()
    for _ in range(120):
        if dice.random() < 0.35:
            rig.arrive(request([dice.randrange(3) for _ in range(dice.randint(1, 12))], dice.randint(1, 8)))
        if rig.asked and dice.random() < 0.15:
            seq = dice.choice(list(rig.asked))
            gone |= {seq} - set(rig.over)
            rig.abort(seq)
        rig.step()
    rig.run()
    assert {seq for seq, done in rig.over.items() if done.reason == "abort"} == gone
    served = [seq for seq, done in rig.over.items() if done.reason == "length"]
    assert len(served) > 15
    assert all(rig.output(seq) == rig.right(seq) for seq in served)


# ------------------------------------------------------------------------------------------------------ preemption


PREEMPTED = {"seed": 7, "temperature": 1.0, "min_tokens": 6}


@both_policies
@pytest.mark.parametrize(("cache", "starts"), [(False, [0, 0, 0]), (True, [0, 8, 8])])
def test_sch_13_preempted_after_four_and_after_six(policy, cache: bool, starts: list[int]) -> None:
    """Preempted after 4 and 6 of 8 tokens, 5, then 5+4, then 5+6 tokens are prefilled, but for the cached ones."""
    rig = Rig(limits(eos_ids=range(500), prefix_cache=cache), policy)
    asked = request((3, 4, 5, 6, 7), 8, **PREEMPTED, stop_token_ids=range(500, 700))
    seq = rig.arrive(asked)
    seen = []
    for generated in (4, 6):
        while len(tokens_of(rig.state, seq)) < 5 + generated:
            rig.step()
        seen.append(tokens_of(rig.state, seq))
        rig.preempt()
        assert status(rig.state, seq) == "WAITING"
    rig.run()
    first = [i for i, (start, _) in enumerate(ranges(rig.plans, seq)) if i in (0, 4, 6)]
    assert [ranges(rig.plans, seq)[i] for i in first] == list(zip(starts, (5, 9, 11), strict=True))
    assert rig.output(seq) == rig.right(seq)
    assert all(rig.over[seq].tokens[: len(tokens)] == tokens for tokens in seen)
    assert rig.over[seq].cached == 0


@both_depths
def test_sch_13_preempted_by_a_full_pool(depth: int) -> None:
    """Two older sequences push the third out twice; it goes on with the same seed, index and floor to 8 tokens."""
    rig = Rig(limits(block_size=1, num_blocks=19, prefix_cache=False, eos_ids=(0, 1, 2)), throughput, depth)
    rig.arrive(request((1, 1), 5, ignore_eos=True))
    rig.arrive(request((2, 2, 2), 12, ignore_eos=True))
    seq = rig.arrive(request((3, 4, 5, 6, 7), 8, **PREEMPTED))
    rig.run()
    steps = [plan.step for plan in rig.plans if plan.preempted]
    assert [rig.plans[step].preempted for step in steps] == [(seq,)] * len(steps)
    assert len(steps) >= 2
    again = [span for span in ranges(rig.plans, seq) if span[0] == 0]
    assert again[0] == (0, 5)
    assert len(again) == len(steps) + 1
    assert again[1:] == sorted(again[1:])
    if depth == 1:
        assert again == [(0, 5), (0, 9), (0, 11)]
    assert rig.output(seq) == rig.right(seq)
    assert len(rig.output(seq)) >= 6


@both_depths
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sch_13_no_preemption_shows(depth: int, cache: bool, size: int) -> None:
    """In pools too small for three sequences each is answered as alone, however often it was preempted."""
    preempted = []
    for slots in (16, 20, 24, 28):
        sizes = {"block_size": size, "num_blocks": slots // size, "eos_ids": (0, 1, 2), "vocab_size": 40}
        rig = Rig(limits(prefix_cache=cache, **sizes), throughput, depth)
        for i, (length, wanted) in enumerate(((4, 12), (5, 8), (6, 10))):
            rig.arrive(request(range(i, i + length), wanted, seed=7 + i, temperature=1.0, min_tokens=6))
        rig.run()
        preempted += [seq for plan in rig.plans for seq in plan.preempted]
        assert all(rig.output(seq) == rig.right(seq) for seq in rig.asked)
    assert len(preempted) >= 3


@both_policies
@both_depths
@pytest.mark.parametrize("size", [1, 4])
def test_sch_13_preempted_at_any_time(policy, depth: int, size: int) -> None:
    """Sent back to wait after any number of steps, in chunks, flight or decode, all get the tokens they would have."""
    for steps in (1, 2, 3, 5, 7, 11):
        rig = Rig(
            limits(block_size=size, num_blocks=40, max_num_batched_tokens=4, vocab_size=40, eos_ids=(3, 4)),
            policy,
            depth,
        )
        for length in (5, 9):
            rig.arrive(request(range(length), 8, **PREEMPTED))
        for i in range(40):
            if i % steps == steps - 1 and i < 14:
                rig.preempt()
            rig.step()
        rig.run()
        assert all(rig.output(seq) == rig.right(seq) for seq in rig.asked)


# -------------------------------------------------------------------------------------------------------- stop ids

STOPS = [  # (end tokens of the model, parameters, forced tokens): (output, reason, what stopped it)
    ((90, 91), {}, (5, 90), ((5, 90), "stop", "90")),
    ((90, 91), {}, (5, 91), ((5, 91), "stop", "91")),
    ((90, 91, 92), {}, (92,), ((92,), "stop", "92")),
    ((90, 91), {}, (92, 5, 6, 93), ((92, 5, 6, 93), "length", "")),
    ((90,), {}, (91, 90), ((91, 90), "stop", "90")),
    ((), {}, (90, 91, 92, 93), ((90, 91, 92, 93), "length", "")),
    ((90, 91), {"ignore_eos": True}, (90, 91, 90, 91), ((90, 91, 90, 91), "length", "")),
    ((90, 91), {"ignore_eos": True, "stop_token_ids": (93,)}, (90, 91, 93), ((90, 91, 93), "stop", "93")),
    ((90, 91), {"ignore_eos": True, "stop_token_ids": (91,)}, (90, 91), ((90, 91), "stop", "91")),
    ((90, 91), {"stop_token_ids": (93, 90)}, (5, 90), ((5, 90), "stop", "90")),
    ((90, 91), {"stop_token_ids": (93,)}, (1, 2, 3, 93), ((1, 2, 3, 93), "stop", "93")),
    ((90, 91), {"stop_token_ids": tuple(range(20, 60))}, (5, 59), ((5, 59), "stop", "59")),
    ((90, 91), {"stop_token_ids": tuple(range(20, 60))}, (5, 91), ((5, 91), "stop", "91")),
]


@both_policies
@both_depths
@pytest.mark.parametrize(("eos", "params", "forced", "right"), STOPS)
def test_smp_11_what_stops(policy, depth: int, eos, params, forced, right) -> None:
    """Every end token of the model stops unless ignored, every stop token always, nothing else; the id is told."""
    rig = Rig(limits(num_blocks=8, vocab_size=96, eos_ids=eos), policy, depth)
    other = rig.arrive(request((7, 8), 9, ignore_eos=True))
    seq = rig.arrive(request((1, 2, 3), 4, **params), forced)
    rig.run()
    done = rig.over[seq]
    assert (done.output, done.reason, done.detail) == right
    assert rig.output(other) == rig.right(other)


@both_policies
@both_depths
@pytest.mark.parametrize("least", [0, 1, 2, 5])
@pytest.mark.parametrize("end", [90, 91, 93])
def test_smp_11_no_end_before_min_tokens(policy, depth: int, least: int, end: int) -> None:
    """A token that would end the sequence can not be sampled before min_tokens, and ends it at the first chance."""
    rig = Rig(limits(num_blocks=8, vocab_size=96, eos_ids=(90, 91)), policy, depth)
    seq = rig.arrive(request((1, 2, 3), 8, min_tokens=least, stop_token_ids=(93,)), (end,) * 8)
    rig.run()
    assert rig.output(seq)[least:] == (end,)
    assert not {90, 91, 93} & set(rig.output(seq)[:least])
    assert (rig.over[seq].reason, rig.over[seq].detail) == ("stop", str(end))


@both_depths
def test_smp_11_ignored_ends_are_not_held_back(depth: int) -> None:
    """With ignore_eos end tokens may come before min_tokens, stop tokens not."""
    rig = Rig(limits(vocab_size=96, eos_ids=(90, 91)), throughput, depth)
    seq = rig.arrive(request((1, 2), 5, min_tokens=3, ignore_eos=True, stop_token_ids=(93,)), (90, 93, 91, 93, 1))
    rig.run()
    first, second, *rest = rig.output(seq)
    assert (first, rest) == (90, [91, 93])
    assert second != 93
    assert rig.over[seq].detail == "93"


def test_smp_11_ids_outside_the_vocabulary_are_refused() -> None:
    """End tokens are checked against the vocabulary with the limits, stop tokens with the request, by name."""
    for bad in (96, -1, True, "5"):
        with pytest.raises(InvalidSetting, match="eos_ids"):
            limits(vocab_size=96, eos_ids=(90, bad))
    for bad in (-1, True, "5", None):
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            request(3, stop_token_ids=(bad,), min_tokens=1)
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 96 is outside"):
        validate(limits(vocab_size=96), request((1, 2), stop_token_ids=(96,), min_tokens=1))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        request(3, stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1))


@both_depths
def test_smp_11_as_many_stop_ids_as_are_allowed(depth: int) -> None:
    """Of 256 stop ids and two end tokens the last one stops, and rows admitted before and after keep their own."""
    rig = Rig(limits(eos_ids=(998, 999)), throughput, depth)
    before = rig.arrive(request((5, 6), 6, stop_token_ids=(300,)), (700, 701, 702, 300))
    rig.step()
    stops = range(500, 500 + MAX_STOP_TOKEN_IDS)
    wide = rig.arrive(request((1, 2), 6, stop_token_ids=stops), (300, stops[-1]))
    after = rig.arrive(request((3, 4), 4, stop_token_ids=(301,)), (stops[-1], 300, 999))
    rig.run()
    assert rig.output(before) == (700, 701, 702, 300)
    assert rig.output(wide) == (300, stops[-1])
    assert rig.output(after) == (stops[-1], 300, 999)
