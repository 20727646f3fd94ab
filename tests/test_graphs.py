"""Captured decode steps: what can be known of them without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agentinfer import graphs
from agentinfer.errors import GraphBinding, InvalidSetting
from agentinfer.graphs import (
    LEAD,
    Block,
    block_words,
    bucket_of,
    bucket_sizes,
    counts_of,
    fill,
    inputs_of,
    lay_out,
    left_of,
    num_entries,
)
from agentinfer.ops.comm import alone
from agentinfer.ops.edit import no_tables
from agentinfer.ops.inputs import host_rows
from agentinfer.ops.provide import reference
from agentinfer.sampling import edited
from agentinfer.state.admit import arrive
from agentinfer.state.columns import PARAMS
from agentinfer.state.commit import commit
from agentinfer.state.engine import initial
from agentinfer.state.ids import Row, SeqId
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Edit, Plan, SamplingColumns, sampled
from agentinfer.state.policy import POLICIES
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import schedule
from agentinfer.steps import Device, Machine


def test_bucket_sizes_are_small_powers_and_multiples_of_eight() -> None:
    """1, 2, 4, 8, then multiples of 8 below the most, and the most itself."""
    assert bucket_sizes(12) == (1, 2, 4, 8, 12)
    assert bucket_sizes(2) == (1, 2)
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(100)[-3:] == (88, 96, 100)
    assert bucket_sizes(512)[-2:] == (504, 512)


@given(st.integers(1, 600))
def test_no_bucket_exceeds_the_rows_and_every_batch_has_one(most: int) -> None:
    """Sizes rise, end with the most, and hold every batch up to it with less than 8 rows of padding above 8."""
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = bucket_of(sizes, rows)
        assert size is not None
        assert rows <= size <= max(2 * rows, rows + 7)
    assert bucket_of(sizes, most + 1) is None


def test_a_batch_larger_than_all_buckets_has_none() -> None:
    """9 rows of 12 take the graph of 12; 13 take none."""
    assert bucket_of((1, 2, 4, 8, 12), 9) == 12
    assert bucket_of((1, 2, 4, 8, 12), 13) is None


@pytest.mark.parametrize("most", [0, -1])
def test_no_rows_is_no_size(most: int) -> None:
    """A graph of no rows is refused."""
    with pytest.raises(InvalidSetting, match="max_num_seqs"):
        bucket_sizes(most)


def decode_plan(prompts: list[int]) -> Plan:
    """The plan of a decode step of rows with these prompt lengths."""
    state = initial(Limits(4, 200, len(prompts), 4096, 512, 100))
    for i, count in enumerate(prompts):
        request = Request([5 + i] * count, SamplingParams(max_tokens=20, temperature=0.5 * i, seed=2**40 + i))
        state, _ = arrive(state, request)
    for _ in range(3):
        state, plan = schedule(state, POLICIES["throughput"])
        assert plan is not None
        if len(plan.slots) == len(plan.rows) == len(prompts):
            return plan
        state, _ = commit(state, plan, sampled(plan, [9] * len(plan.samples)))
    raise AssertionError


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 3))
def test_a_block_holds_the_plan_and_padding_points_at_the_sink(prompts: list[int], spare: int) -> None:
    """What is read of a filled block is the plan; rows left over are row 0 with one key, in the sink's slot."""
    plan = decode_plan(prompts)
    n = len(prompts)
    size = n + spare
    whole = torch.full((block_words(size),), 0x55555555, dtype=torch.int32)
    block = lay_out(whole, size)
    fill(block, plan, np.array([7, 3], np.int32), np.array([11, 12], np.int32), ())
    order = block.places[:n].numpy()
    assert sorted(block.places.tolist()) == list(range(size))
    assert sorted(plan.context.tolist(), reverse=True) == block.context[:n].tolist()
    assert block.positions.tolist() == [*plan.start[order].tolist(), *[0] * spare]
    assert block.slots.tolist() == [*plan.slots[order].tolist(), *[0] * spare]
    assert block.rows.tolist() == [*plan.rows[order].tolist(), *[0] * spare]
    assert block.context.tolist() == [*plan.context[order].tolist(), *[1] * spare]
    assert block.inputs.tolist() == [*plan.inputs[order].tolist(), *[0] * spare]
    assert block.index.tolist() == [*plan.sampling.index[order].tolist(), *[0] * spare]
    temperature = block.params[:, 0].contiguous().view(torch.float32)
    assert temperature[:n].tolist() == plan.sampling.temperature[order].tolist()
    seeds = block.params[:, 4:6].clone().view(torch.int64)
    assert seeds.view(-1)[:n].tolist() == plan.sampling.seed[order].tolist()
    assert block.entries.shape == (2, num_entries(size))
    assert block.entries[:, :2].tolist() == [[7, 3], [11, 12]]
    assert not block.entries[:, 2:].any()
    pieces = [getattr(block, field.name) for field in fields(Block) if field.name != "whole"]
    assert sum(x.numel() * x.itemsize for x in pieces) == (whole.numel() - LEAD) * 4


def test_samples_that_are_edited_are_greedy_in_a_graph() -> None:
    """They are chosen after it, and need their logits whole, with them those with filters; others keep their
    parameters.
    """
    plan = decode_plan([3, 5, 4, 6])
    params = plan.sampling.params.copy()
    params["temperature"] = 2
    params["top_k"][3], params["top_p"][3], params["min_p"][3] = 7, 0.5, 0.25
    edits = (Edit(2, Row(int(plan.rows[2])), SeqId(2), Request((1,), SamplingParams(presence_penalty=1))),)
    plan = evolve(plan, sampling=SamplingColumns(params, plan.sampling.index, ((1, (4, 9)),)), edits=edits)
    unused: Any = None
    limits = Limits(4, 200, 4, 64, 64, 100)
    m = Machine(unused, unused, reference(), alone(torch.device("cpu")), limits, unused, overlap=True)
    assert left_of(m, plan) == ((1, 2, 3), ())
    assert left_of(m, evolve(plan, edits=(), sampling=SamplingColumns(params, plan.sampling.index, ()))) == ((), ())
    block = lay_out(torch.zeros(block_words(4), dtype=torch.int32), 4)
    fill(block, plan, np.empty(0, np.int32), np.empty(0, np.int32), (1, 2, 3))
    there = block.params.numpy()[np.argsort(block.places.numpy())].view(PARAMS).reshape(-1)
    assert there["temperature"].tolist() == [2, 0, 0, 0]
    assert there["seed"].tolist() == params["seed"].tolist()
    assert params["temperature"].tolist() == [2, 2, 2, 2]
    assert edited(plan) == ((1, 2), ())


def test_samples_that_are_filtered_and_judged_stay_with_a_graph() -> None:
    """It has chosen them, and left their logits as they were."""
    plan = decode_plan([3, 5])
    plan.sampling.params.setflags(write=True)
    plan.sampling.params["top_p"] = 0.5
    assert edited(evolve(plan, logprobs=np.array([2, -1], np.int32))) == ((), ())


class Calls(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [4, 32])
def test_the_second_choice_is_few_calls(rows: int) -> None:
    """After a replay, of rows with bias, penalties and end tokens held back: three of the ops, and of torch little but
    views of one block and of what was chosen; however many rows ask.
    """
    asked = ({"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}, {"min_tokens": 5}, {"temperature": 0.0})
    state = initial(Limits(4, 200, rows, 4096, 512, 100, eos_ids=(2,)))
    for i in range(rows):
        state, _ = arrive(state, Request((5, 6), SamplingParams(max_tokens=20, seed=i, **asked[i % 4])))
    state, plan = schedule(state)
    assert plan is not None
    assert len(edited(plan)[0]) == 3 * rows // 4
    device, done = torch.device("cpu"), list[str]()

    def op(name: str, result: Any = None) -> Any:
        def called(*given: Any) -> Any:
            done.append(name)
            return result

        return called

    ops = evolve(
        reference(),
        edit_rows=op("edit", torch.empty(3 * rows // 4, 100)),
        sample_rows=op("sample"),
        enter_rows=op("enter"),
    )
    unused: Any = None
    m = Machine(unused, unused, ops, alone(device), state.limits, unused, overlap=True)
    there = Device(unused, torch.zeros(rows + 1, dtype=torch.int64), no_tables(100, device))
    logits, chosen = torch.zeros(rows, 100), torch.zeros((2, rows), dtype=torch.int64)
    with Calls() as calls:
        graphs._after(m, logits, chosen, there, plan, np.arange(rows, dtype=np.int32), *left_of(m, plan))
    assert done == ["edit", "sample", "enter"]
    assert len(calls.names) <= 14, calls.names


def test_the_inputs_of_a_graph_are_views_of_its_block() -> None:
    """A new block shows in the inputs; lengths on the host there are none, and who asks for them is told."""
    block = lay_out(torch.zeros(block_words(2), dtype=torch.int32), 2)
    counts, ids = counts_of(2, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    x = inputs_of(block, torch.zeros((3, 4), dtype=torch.int32), ids, counts, 64)
    fill(block, decode_plan([3, 5]), np.empty(0, np.int32), np.empty(0, np.int32), ())
    assert x.positions.tolist() == [5, 3]
    assert x.context.tolist() == [6, 4]
    assert x.rows.tolist() == x.last_rows.tolist() == block.rows.tolist()
    assert x.cu_seqlens_q.tolist() == [0, 1, 2]
    assert (x.max_query, x.max_context) == (1, 64)
    with pytest.raises(GraphBinding, match="lengths"):
        host_rows(x)
