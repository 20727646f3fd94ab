"""The name of a plan, which ranks compare."""

from __future__ import annotations

import numpy as np
from attrs import evolve, fields

import engines
from agentinfer.state.commit import commit
from agentinfer.state.engine import initial
from agentinfer.state.event import Arrived
from agentinfer.state.history import fold
from agentinfer.state.ids import Row, SeqId, seal
from agentinfer.state.plan import Edit, Plan, Scored, Told, plan_digest, sampled
from agentinfer.state.schedule import schedule


def plans(count: int) -> list[Plan]:
    """The first plans of three requests, planned anew."""
    state = fold(initial(engines.limits()), [Arrived(engines.request(n, 6)) for n in (3, 5, 2)])
    found: list[Plan] = []
    for _ in range(count):
        state, plan = schedule(state)
        assert plan is not None
        found.append(plan)
        state, _ = commit(state, plan, sampled(plan, [7] * len(plan.samples)))
    return found


def test_equal_plans_have_one_name_and_steps_have_different_ones() -> None:
    """The same history gives the same names, and no two steps share one."""
    names = [plan_digest(plan) for plan in plans(5)]
    assert names == [plan_digest(plan) for plan in plans(5)]
    assert len(set(names)) == 5


def test_every_field_of_a_plan_is_in_its_name() -> None:
    """A plan that differs in one number anywhere, its sampling included, has another name."""
    plan = plans(1)[0]
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray):
            other = value.copy()
            other[-1] += 1
            seal(other)
        elif field.name == "sampling":
            params = value.params.copy()
            params["temperature"][0] += 1
            index = value.index.copy()
            index[0] += 1
            seal(params, index)
            changed = (evolve(value, params=params), evolve(value, index=index), evolve(value, banned=((0, (1,)),)))
            assert plan_digest(plan) not in [plan_digest(evolve(plan, sampling=x)) for x in changed]
            continue
        elif field.name == "edits":
            other = (*value, Edit(0, Row(1), SeqId(0), engines.request(3, 6)))
        elif field.name == "logprobs":
            other = np.zeros(len(plan.samples), np.int32)
        elif field.name == "scored":
            other = Scored(*np.zeros((5, 1), np.int32))
        elif field.name == "told":
            other = (*value, Told(Row(1), engines.request(3, 6), (5, 6)))
        else:
            other = (*value, (1, 2, (3,))) if isinstance(value, tuple) else value + 1
        if field.name != "sample_rows":  # follows from samples and count
            assert plan_digest(evolve(plan, **{field.name: other})) != plan_digest(plan), field.name
