"""What callers may do wrong, or ask too much of: nothing is lost by it."""

from __future__ import annotations

import numpy as np
import pytest

from agentinfer.state.admit import arrive, end, fail
from agentinfer.state.check import violations
from agentinfer.state.commit import commit
from agentinfer.state.engine import EngineState, initial
from agentinfer.state.event import Failed
from agentinfer.state.history import Moment, step
from agentinfer.state.ids import SeqId
from agentinfer.state.limits import Limits
from agentinfer.state.plan import sampled
from agentinfer.state.policy import NOBODY, Turn, needs, queue
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import schedule


def limits(size: int, budget: int) -> Limits:
    return Limits(size, 40, 4, budget, 24, 50)


def requests(state: EngineState, *lengths: int) -> EngineState:
    for n in lengths:
        state, _ = arrive(state, Request(tuple(range(1, n + 1)), SamplingParams(max_tokens=5)))
    return state


def asks_for_all(newest_first: bool, times: int):
    """A policy that asks for everything that rows need, or more, whatever the budget."""

    def policy(state: EngineState):
        way = slice(None, None, -1 if newest_first else 1)
        yield Turn(state.order[way], needs(state)[way] * np.int32(times), queue(state), NOBODY, reserve=False)

    return policy


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(1, 1, 7), (7, 1, 1), (3, 9, 2, 5)])
def test_a_policy_that_asks_for_too_much_gets_the_budget(lengths, size, budget, times, newest_first) -> None:
    """Whatever a policy asks for, the budget holds, every position has its block, and everything comes to an end."""
    policy = asks_for_all(newest_first, times)
    state, ended = requests(initial(limits(size, budget)), *lengths), 0
    for _ in range(200):
        state, plan = schedule(state, policy)
        if plan is None:
            break
        assert 0 < int(plan.count.sum()) == len(plan.slots) <= budget
        assert violations(state) == []
        state, output = commit(state, plan, sampled(plan, [9] * len(plan.samples)))
        assert violations(state) == []
        ended += len(output.finished)
    assert ended == len(lengths)
    assert state.pool.num_available == 40


@pytest.mark.parametrize("running", [True, False])
def test_a_sequence_that_is_named_twice_ends_once(running: bool) -> None:
    """Failing or ending a sequence twice in one call frees its blocks once and tells of it once."""
    state = requests(initial(limits(2, 8)), 3, 4)
    plan = None
    if running:
        state, plan = schedule(state)
    seq = SeqId(0)
    for ends in (fail(state, (seq, seq), "x"), end(state, [seq, seq, seq], "abort", "")):
        assert violations(ends) == []
        assert [one.seq for one in ends.ended] == [seq]
    if plan is not None:
        after = step(Moment(state, (plan,)), Failed(plan.step, (seq, seq), "x")).state
        assert violations(after) == []
        assert [one.seq for one in after.ended] == [seq]
