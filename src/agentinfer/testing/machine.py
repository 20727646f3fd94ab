"""EngineMachine: Hypothesis plays client, device and disaster; Drive holds every step against the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, ParamSpec, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from agentinfer.state.blocks import BlockHash
from agentinfer.state.ids import SeqId
from agentinfer.state.limits import Limits
from agentinfer.state.policy import Policy, reserve, throughput
from agentinfer.testing import strategies
from agentinfer.testing.books import Promises
from agentinfer.testing.drive import Drive

RESERVE = Promises(never_preempts=True, unmixed=True, in_order=True)
"""What `policy.reserve` promises."""
THROUGHPUT = Promises(newest_first=True, patient=True, busy=True, in_order=True)
"""What `policy.throughput` promises."""
P = ParamSpec("P")
_SEEDS = st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1, max_size=3)


def promises_of(policy: Policy) -> Promises:
    """What the package's own policies promise; of any other, nothing is known."""
    known: dict[Policy, Promises] = {reserve: RESERVE, throughput: THROUGHPUT}
    return known.get(policy, Promises())


class EngineMachine(RuleBasedStateMachine):
    """One engine under *policy*, tried out: mutable, as Hypothesis wants it. Make your own with `engine_machine`."""

    policy: ClassVar[Policy] = staticmethod(throughput)
    overlap: ClassVar[bool] = False
    promises: ClassVar[Promises] = THROUGHPUT
    drive: Drive
    broken = False
    """A Fault has been raised."""

    @initialize(limits=strategies.limits(), hasher=st.sampled_from((*strategies.HASHES[:1] * 4, *strategies.HASHES)))
    def start(self, limits: Limits, hasher: BlockHash) -> None:
        """An engine with nothing to do; at times one whose hashes collide."""
        kind = type(self)
        self.drive = Drive(limits, kind.policy, kind.overlap, kind.promises, hasher)

    @rule(data=st.data(), times=st.integers(1, 3))
    def arrive(self, data: st.DataObject, times: int) -> None:
        """Requests, often such as go on from an earlier sequence."""
        for _ in range(times):
            earlier = [script.answer.tokens for script in self.drive.ghost.scripts.values()]
            self._do(self.drive.arrive, data.draw(strategies.requests(self.drive.limits, earlier[-8:])))

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        """A few steps that go well."""
        for _ in range(times):
            self._do(self.drive.step)

    @rule(data=st.data())
    def arrive_and_step(self, data: st.DataObject) -> None:
        """A request while the others go on."""
        self.arrive(data, 1)
        self._do(self.drive.step)

    @rule(data=st.data(), times=st.integers(1, 6), fault=st.sampled_from((None, None, None, "launch", "land", "bad")))
    def speculate(self, data: st.DataObject, times: int, fault: str | None) -> None:
        """Steps in which guesses are verified: right ones, wrong ones, and right ones with wrong ones after."""
        for i in range(times):
            going_wrong = fault if i == times - 1 else None
            self._do(
                self.drive.step,
                launch_fails=going_wrong == "launch",
                land_fails=going_wrong == "land",
                bad=data.draw(st.integers(0, 15)) if going_wrong == "bad" else None,
                propose=lambda: data.draw(strategies.drafts(self.drive.ghost.scripts.values())),
            )

    @rule(launch=st.booleans(), land=st.booleans())
    def fail(self, launch: bool, land: bool) -> None:
        """A step that raises: at launch, at landing, or the one at launch while the one before lands badly too."""
        self._do(self.drive.step, launch_fails=launch, land_fails=land or not launch)

    @rule(which=st.integers(0, 7))
    def bad_logits(self, which: int) -> None:
        """A step with one row of logits that are not finite."""
        self._do(self.drive.step, bad=which)

    @precondition(lambda self: self.drive.state.next_seq > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A client that loses interest, maybe too late."""
        self._do(self.drive.abort, SeqId(data.draw(st.integers(0, self.drive.state.next_seq))))

    @precondition(lambda self: self.drive.state.next_seq > 0)
    @rule(data=st.data(), count=st.integers(0, 5))
    def stop(self, data: st.DataObject, count: int) -> None:
        """A stop string is found in what was generated; the report of it may be late, too."""
        self._do(self.drive.stop, SeqId(data.draw(st.integers(0, self.drive.state.next_seq))), count)

    @precondition(lambda self: bool(self.drive.live))
    @rule(data=st.data(), seeds=_SEEDS)
    def fork(self, data: st.DataObject, seeds: list[int | None]) -> None:
        """A live sequence, a running one by preference, goes on in up to three more ways."""
        running = [run.seq for run in self.drive.state.rows if run is not None]
        self._do(self.drive.fork, data.draw(st.sampled_from([*running * 3, *self.drive.live])), seeds)
        self._do(self.drive.step)

    @precondition(lambda self: bool(self.drive.snapshots))
    @rule(back=st.integers(0, 5))
    def rewind(self, back: int) -> None:
        """Back to an older state, over the device as it is."""
        self._do(self.drive.rewind, back)

    @rule(budget=st.integers(1, 8))
    def set_budget(self, budget: int) -> None:
        """Another budget: fewer positions than rows, maybe."""
        self._do(self.drive.set_budget, budget)

    def teardown(self) -> None:
        """All that is left comes to its end, and every block back; not after a Fault, which it would only hide."""
        if hasattr(self, "drive") and not self.broken:
            self.drive.drain()

    def _do(self, act: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        self.broken = True
        act(*args, **named)
        self.broken = False


def engine_machine(policy: Policy, *, overlap: bool = False, promises: Promises | None = None) -> type[EngineMachine]:
    """The state machine for *policy*. *promises*: claims to hold it to; None: those of the package's own policies."""
    claims = promises_of(policy) if promises is None else promises
    members = {"policy": staticmethod(policy), "overlap": overlap, "promises": claims, "__doc__": EngineMachine.__doc__}
    return type("OverlappedEngineMachine" if overlap else "EngineMachine", (EngineMachine,), members)


def check_policy(policy: Policy, examples: int = 200, *, promises: Promises | None = None, steps: int = 30) -> None:
    """Try *policy* on *examples* random programs, half of them with overlap; raise Fault, shrunk, if any goes wrong.

    A policy is a plain function, so this is all it takes to test one of your own::

        from itertools import islice

        from attrs import evolve
        from agentinfer.state.policy import throughput
        from agentinfer.testing import check_policy

        def one_at_a_time(state):
            for turn in throughput(state):
                yield evolve(turn, admit=islice(turn.admit, 0 if len(state.order) else 1))

        check_policy(one_at_a_time)

    *steps*: rules a program. *promises*: what the policy claims beyond the rules that bind every policy.
    """
    for overlap in (False, True):
        run_state_machine_as_test(
            engine_machine(policy, overlap=overlap, promises=promises),
            settings=settings(
                max_examples=max(examples // 2, 1),
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=cast(tuple[HealthCheck, ...], tuple(HealthCheck)),
            ),
        )
