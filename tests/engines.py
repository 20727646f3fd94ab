"""Small engines to schedule by hand, and what their plans say. Shared by the tests of the control plane."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define

from agentinfer.state.admit import arrive
from agentinfer.state.commit import commit
from agentinfer.state.engine import EngineState, find_running, initial
from agentinfer.state.ids import ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Output, Plan, sampled
from agentinfer.state.policy import Policy, reserve, throughput
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import schedule, scheduled
from agentinfer.testing import RESERVE, THROUGHPUT, Drive

BOTH = (throughput, reserve)


def limits(**sizes: Any) -> Limits:
    """Roomy sizes with blocks of 4, but for the *sizes* that matter."""
    roomy = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": 1000,
    }
    return Limits(**{**roomy, **sizes})


def request(prompt: int | Sequence[int], max_tokens: int | None = 1, salt: str | None = None, **params: Any) -> Request:
    """A request for *max_tokens*; a number of prompt tokens stands for as many that no other number shares."""
    tokens = [(prompt * 64 + i) % 999 + 1 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        tuple(tokens), SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 0, **params}), salt
    )


def drive(lim: Limits, policy: Policy = throughput, **more: Any) -> Drive:
    """An engine over the ghost device that holds the package's own policies to their promises."""
    promises = {throughput: THROUGHPUT, reserve: RESERVE}.get(policy)
    return Drive(lim, policy, **({"promises": promises} if promises else {}), **more)


def ranges(plans: Iterable[Plan], seq: int) -> list[tuple[int, int]]:
    """The ranges of positions [first, last) that *plans* compute of *seq*."""
    return [span for plan in plans for number, span in scheduled(plan).items() if number == seq]


def sampling_steps(plans: Iterable[Plan], seq: int) -> list[int]:
    """The steps of *plans* that sample a token for *seq*."""
    return [plan.step for plan in plans if seq in plan.seqs[plan.sample_rows]]


def blocks_of(state: EngineState, seq: int) -> tuple[int, ...]:
    """The block table of *seq*; empty if it does not run."""
    run = find_running(state, seq)
    return () if run is None else run.blocks


def in_use(state: EngineState) -> int:
    """Blocks that any sequence holds."""
    return int((state.pool.refs > 0).sum())


@define
class Hand:
    """An engine whose tokens are chosen by the test: 1 unless `script` says otherwise. No overlap."""

    state: EngineState
    policy: Policy
    script: dict[int, list[int]]

    @classmethod
    def of(cls, lim: Limits, *requests: Request, policy: Policy = throughput) -> Hand:
        """An engine at which *requests* have arrived."""
        hand = cls(initial(lim), policy, {})
        for asked in requests:
            hand.arrive(asked)
        return hand

    def arrive(self, asked: Request, tokens: Sequence[int] = ()) -> int:
        """Queue *asked*, which will sample *tokens* first."""
        self.state, seq = arrive(self.state, asked)
        self.script[seq] = list(tokens)
        return seq

    def plan(self) -> Plan:
        """Plan a step; there must be one."""
        self.state, plan = schedule(self.state, self.policy)
        assert plan is not None
        return plan

    def land(self, plan: Plan, bad: Iterable[int] = ()) -> Output:
        """Land *plan* with the tokens of the script."""
        tokens = [self.script[seq].pop(0) if self.script[seq] else 1 for seq in ints(plan.seqs[plan.sample_rows])]
        ok = [i not in set(bad) for i in range(len(tokens))]
        self.state, output = commit(self.state, plan, sampled(plan, tokens, ok))
        return output

    def step(self) -> tuple[Plan, Output]:
        """Plan a step and land it."""
        plan = self.plan()
        return plan, self.land(plan)

    def run(self, most: int = 1000) -> Mapping[int, Any]:
        """Step until there is nothing to plan; how each sequence ended."""
        over: dict[int, Any] = {}
        for _ in itertools.repeat(None, most):
            self.state, plan = schedule(self.state, self.policy)
            if plan is None:
                return over
            over |= {done.seq: done for done in self.land(plan).finished}
        raise AssertionError(f"still running after {most} steps")
