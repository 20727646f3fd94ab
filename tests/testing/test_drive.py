"""Drive and check_policy must notice: faulty policies, and faults that only time shows."""

from __future__ import annotations

from itertools import islice

import pytest
from attrs import evolve

from agentinfer.state import blocks as blocks_module
from agentinfer.state.policy import reserve, throughput
from agentinfer.testing import RESERVE, THROUGHPUT, Drive, EngineMachine, Fault, Promises, check_policy, engine_machine
from agentinfer.testing import drive as drive_module
from agentinfer.testing.ledger import contents
from engines import drive, limits, request


def one_at_a_time(state):
    """The policy of the documentation."""
    for turn in throughput(state):
        yield evolve(turn, admit=islice(turn.admit, 0 if len(state.order) else 1))


def test_a_policy_of_ones_own_is_tried_in_one_line() -> None:
    """check_policy runs a sound policy through random programs without a word."""
    check_policy(one_at_a_time, examples=6)


@pytest.mark.parametrize("policy", [throughput, reserve])
def test_the_packages_policies_are_held_to_their_promises(policy) -> None:
    """Unless told otherwise the machine holds both policies to what they claim, and a stranger to nothing."""
    assert engine_machine(policy).promises == {throughput: THROUGHPUT, reserve: RESERVE}[policy]
    assert engine_machine(one_at_a_time).promises == Promises()
    machine = engine_machine(policy, overlap=True, promises=Promises(patient=True))
    assert (machine.policy, machine.overlap, machine.promises) == (policy, True, Promises(patient=True))
    assert issubclass(machine, EngineMachine)


def serves_nobody(state):
    """A policy that starves everybody once two sequences run."""
    for turn in throughput(state):
        if len(state.order) < 2:
            yield turn


def newest_last(state):
    """A policy that preempts the oldest."""
    for turn in throughput(state):
        yield evolve(turn, victims=turn.victims[::-1])


def favours_the_old(state):
    """A policy that forgets whose turn it was."""
    for turn in throughput(state):
        yield evolve(turn, short=False)


def wasteful(state):
    """A policy that gives each row one position, whatever is left."""
    for turn in throughput(state):
        yield evolve(turn, count=turn.count.clip(0, 1), admit=() if len(state.order) else turn.admit)


@pytest.mark.parametrize(
    ("policy", "promises", "words"),
    [
        (serves_nobody, Promises(), "serves nobody"),
        (newest_last, Promises(newest_first=True), "oldest first"),
        (favours_the_old, Promises(patient=True), "left out"),
        (wasteful, Promises(busy=True), "could do more"),
        (throughput, Promises(unmixed=True), "are prompts"),
        (throughput, Promises(never_preempts=True), "still need"),
        (reserve, Promises(busy=True), "could do more"),
    ],
)
def test_a_broken_promise_is_found(policy, promises: Promises, words: str) -> None:
    """A faulty policy, or one held to another's promises, is a Fault that says how."""
    blocks = 30 if promises.newest_first or promises.never_preempts else 200
    sizes = limits(block_size=1, num_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=26)
    with pytest.raises(Fault, match=words):
        crowd(Drive(sizes, policy, promises=promises))
    if promises.newest_first or promises.patient or promises.busy:
        crowd(Drive(sizes, throughput, promises=promises))
    else:
        crowd(Drive(sizes, reserve, promises=promises))


def crowd(engine: Drive) -> None:
    """More than fits, one after the other; then the budget is lowered."""
    for i in range(8):
        engine.arrive(request((i + 1, *range(2 if i else 9)), 12))
        engine.step()
    engine.set_budget(2)
    engine.drain()


class LastInFirstOut(blocks_module.PoolDraft):
    """A pool that releases a chain's head first."""

    def drop(self, blocks) -> None:
        super().drop(tuple(blocks)[::-1])


class MostRecentFirst(blocks_module.PoolDraft):
    """A pool that evicts what was used last."""

    def _evict(self):
        block, _ = [entry for entry in self.lru if self.cached.get(entry[0]) == entry[1]][-1]
        del self.cached[block]
        del self.index[self.keys[block].hash]
        del self.keys[block]
        return block


class Forgetful(blocks_module.PoolDraft):
    """A pool that registers nothing."""

    def register(self, block, parent, salt, tokens, h) -> bool:
        return False


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (LastInFirstOut, "outlive its parent|evicted before"),
        (MostRecentFirst, "outlived its parent|evicted before|is registered after"),
        (Forgetful, "landed and full, but not to be found"),
    ],
)
def test_a_faulty_cache_is_found(pool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has its own opinion on who leaves first and what can be found."""
    for module in ("schedule", "commit", "admit"):
        monkeypatch.setattr(f"agentinfer.state.{module}.PoolDraft", pool)
    engine = drive(limits(num_blocks=8, max_model_len=32))

    def prompts() -> None:
        for i in range(8):
            engine.arrive(request(range(i % 3 * 40, i % 3 * 40 + 9 + i), 3))
            engine.drain()

    with pytest.raises(Fault, match=words):
        prompts()


@pytest.mark.parametrize(
    ("forget", "words"),
    [
        (lambda _, pool, heads: None, "had no finite logits"),
        (lambda real, pool, heads: real(pool, [block for block in pool.keys if pool.refs[block] == 0]), "lost blocks"),
    ],
)
def test_a_cache_that_forgets_too_little_or_too_much_is_found(
    forget, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sequence without finite logits leaves in the cache, and what it takes along, are Faults."""
    real = blocks_module.PoolDraft.forget

    def broken() -> None:
        engine = drive(limits(max_num_batched_tokens=4))
        engine.arrive(request(range(20, 29), 1))
        engine.drain()
        engine.arrive(request(range(12), 1))
        while engine.live or engine.due:
            engine.step(bad=0)
        engine.drain()

    broken()
    monkeypatch.setattr(blocks_module.PoolDraft, "forget", lambda pool, heads: forget(real, pool, heads))
    with pytest.raises(Fault, match=words):
        broken()


def test_a_transition_that_is_not_pure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing into the state that was given, or two answers to one question, is a Fault."""
    real = drive_module.accept

    def scribbles(state, plan, sampled, hasher):
        state.cols.turn.flags.writeable = True
        state.cols.turn[0] += 1
        return real(state, plan, sampled, hasher)

    monkeypatch.setattr(drive_module, "accept", scribbles)
    with pytest.raises(Fault, match="changed the state"):
        crowd(drive(limits()))


def test_two_plans_for_one_state_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that is not a function of the state is a Fault that names the field."""
    real, calls = drive_module.schedule, iter(range(10**6))

    def moody(state, policy, hasher):
        after, plan = real(state, policy, hasher)
        return after, plan and evolve(plan, preempted=(next(calls),))

    monkeypatch.setattr(drive_module, "schedule", moody)
    with pytest.raises(Fault, match="preempted"):
        crowd(drive(limits()))


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that drops a token of an output is a Fault that says which should have come."""
    real = drive_module.accept

    def loses(state, plan, sampled, hasher):
        after, output = real(state, plan, sampled, hasher)
        return after, evolve(output, seqs=output.seqs[1:], tokens=output.tokens[1:])

    monkeypatch.setattr(drive_module, "accept", loses)
    with pytest.raises(Fault, match="it should be"):
        crowd(drive(limits()))


def test_an_end_that_nobody_tells_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished sequence missing from the output is a Fault."""
    real = drive_module.accept

    def silent(state, plan, sampled, hasher):
        after, output = real(state, plan, sampled, hasher)
        return after, evolve(output, finished=())

    monkeypatch.setattr(drive_module, "accept", silent)
    with pytest.raises(Fault, match="no output says so"):
        crowd(drive(limits()))


def test_contents_are_read_along_the_chain() -> None:
    """A registered block's content is all tokens from the start of its sequence, under its salt."""
    engine = drive(limits())
    engine.arrive(request(range(9), 1, salt="s"))
    engine.drain()
    assert sorted(contents(engine.state.pool).values()) == [("s", (0, 1, 2, 3)), ("s", tuple(range(8)))]
