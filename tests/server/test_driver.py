"""The engine's thread: commands in, reports out, and what becomes of requests when something fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from agentinfer.loop import Engine, generate, open_engine
from agentinfer.server.driver import FATAL, Driver, drive
from agentinfer.server.mail import (
    Accepted,
    Command,
    Died,
    Drop,
    Ended,
    Item,
    Look,
    Pause,
    Quit,
    Refused,
    Report,
    Seen,
    Submit,
    Turned,
)
from agentinfer.state.request import SamplingParams
from serving import slowed, small, with_forward

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


class Line:
    """Mutable: the other end of a driver's mail. Every message crosses as bytes, as between two processes."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self.reports: list[Report] = []
        self.changed = threading.Condition()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.inbox.put(msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command))

    def tell(self, reports: Any) -> None:
        crossed = [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Report) for one in reports]
        with self.changed:
            self.reports += crossed
            self.changed.notify_all()

    def wait(self, seen: Callable[[list[Report]], Any], within_s: float = 20.0) -> Any:
        """What *seen* finds in the reports, once it finds anything."""
        with self.changed:
            assert self.changed.wait_for(lambda: seen(self.reports), within_s), self.reports[-3:]
            return seen(self.reports)

    def ended(self, number: int, count: int = 1) -> list[Ended]:
        """The ends of request *number*, *count* of them."""

        def found(reports: list[Report]) -> list[Ended] | None:
            ends = [one for one in reports if isinstance(one, Ended) and one.id == number]
            return ends if len(ends) == count else None

        return self.wait(found)

    def tokens(self, number: int, index: int) -> tuple[int, ...]:
        """All tokens that were told of a sequence."""
        said: list[int] = []
        for report in self.reports:
            if isinstance(report, Turned):
                columns = zip(report.ids, report.indices, report.tokens, strict=True)
                said += [token for one, i, token in columns if (one, i) == (number, index)]
            if isinstance(report, Ended) and (report.id, report.index) == (number, index):
                said += report.tokens
        return tuple(said)


@contextmanager
def driven(engine: Engine) -> Generator[Line]:
    """A driver of *engine*, that ends with the block."""
    line = Line()
    thread = threading.Thread(target=drive, args=(Driver(engine, line.inbox, line.tell),), daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.send(Quit())
        thread.join(20)
        assert not thread.is_alive()


def asked(number: int, *prompts: list[int], params: SamplingParams = PARAMS) -> Submit:
    return Submit(number, tuple(Item(tuple(prompt), params) for prompt in prompts))


def free(engine: Engine) -> bool:
    state = engine.world.state
    return state.pool.num_available == state.limits.num_blocks and not len(state.order) and not len(state.waiting)


def test_tokens_are_those_of_the_engine(folder: Path) -> None:
    """Every token of every item is told once, in order, and equals what generate gives."""
    prompts = [[5, 6, 7], [9] * 20, [1, 2]]
    want = [result.output_ids for result in generate(open_engine(folder, small()), prompts, PARAMS)]
    engine = open_engine(folder, small())
    with driven(engine) as line:
        line.send(asked(7, *prompts), asked(8, prompts[0]))
        ends = line.ended(7, 3)
        line.ended(8)
        assert [line.tokens(7, i) for i in range(3)] == want
        assert line.tokens(8, 0) == want[0]
        assert {(end.reason, end.num_hidden) for end in ends} == {("length", 0)}
        assert [one for one in line.reports if isinstance(one, Accepted)] == [Accepted(7), Accepted(8)]
    assert free(engine)


def test_an_end_token_has_no_text(folder: Path) -> None:
    """The end says how many of the last tokens are not shown: the model's end token is one."""
    engine = open_engine(folder, small())
    first = generate(engine, [[5, 6, 7]], PARAMS)[0].output_ids[0]
    params = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(first,))
    with driven(engine) as line:
        line.send(asked(1, [5, 6, 7], params=params))
        (end,) = line.ended(1)
        assert (end.reason, end.num_hidden, len(line.tokens(1, 0))) == ("stop", 1, 1)


def test_one_bad_item_refuses_all(folder: Path) -> None:
    """A request with an item that can not be served is refused whole, naming it, and leaves nothing behind."""
    engine = open_engine(folder, small())
    with driven(engine) as line:
        line.send(asked(1, [5], [], [6]), asked(2, [5], params=SamplingParams(max_tokens=5000)), asked(3, [5]))
        line.ended(3)
        refused = [one for one in line.reports if isinstance(one, Refused)]
        assert [(one.id, one.index, one.field) for one in refused] == [(1, 1, "prompt"), (2, 0, "max_tokens")]
        assert "5000" in refused[1].message
    assert free(engine)


def test_a_dropped_request_frees_its_blocks_within_two_steps(folder: Path) -> None:
    """What nobody waits for is gone two steps later at most; the others go on to their own tokens."""
    engine = slowed(open_engine(folder, small()), 0.01)
    with driven(engine) as line:
        line.send(asked(1, [5, 6], [7, 8], params=LONG), asked(2, [5, 6], params=LONG))
        line.wait(lambda reports: sum(len(one.tokens) for one in reports if isinstance(one, Turned)) > 9)
        before = engine.world.state.step
        line.send(Drop(1, "test"))
        ends = line.ended(1, 2)
        assert engine.world.state.step <= before + 3  # one more may have begun while the message was on its way
        assert {end.reason for end in ends} == {"abort"}
        assert len(engine.world.state.order) == 1
        line.send(Drop(2, "test"))
        line.ended(2)
    assert free(engine)


def test_it_rests_while_paused(folder: Path) -> None:
    """Paused, it takes requests and makes no step; aborts and looks are answered."""
    engine = open_engine(folder, small())
    with driven(engine) as line:
        line.send(Pause(paused=True), asked(1, [5]), asked(2, [6]), Look(9))
        seen = line.wait(lambda reports: [one for one in reports if isinstance(one, Seen)])
        assert [len(one.state["waiting"]) for one in seen] == [2]
        time.sleep(0.05)
        assert engine.world.state.step == 0
        line.send(Drop(2, "test"))
        assert line.ended(2)[0].reason == "abort"
        line.send(Pause(paused=False))
        assert line.ended(1)[0].reason == "length"
    assert free(engine)


def test_an_end_says_how_long_it_was_queued(folder: Path) -> None:
    """From its arrival to its first step: nothing for who finds room, the time of others for who does not."""
    engine = slowed(open_engine(folder, small(max_num_seqs=1)), 0.01)
    with driven(engine) as line:
        line.send(asked(1, [5]), asked(2, [6]), asked(3, [7], params=LONG))
        first, second = line.ended(1)[0].queued_s, line.ended(2)[0].queued_s
        assert 0 <= first < second
        assert 0.05 < second < 5
        line.send(asked(4, [8]), Drop(4, "never in a step"))
        assert 0 <= line.ended(4)[0].queued_s < 5
        line.send(Drop(3, "test"))
        assert line.ended(3)[0].queued_s > second


def test_a_step_that_raises_fails_its_requests_alone(folder: Path) -> None:
    """The requests of a step that raises end with the error, and the next ones are served."""
    engine, calls = open_engine(folder, small()), []
    inner = engine.machine.model.forward

    def forward(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return inner(*given)

    with driven(with_forward(engine, forward)) as line:
        line.send(asked(1, [5, 6]))
        (end,) = line.ended(1)
        assert end.reason == "error"
        assert "planted" in end.detail
        line.send(asked(2, [5, 6]))
        assert line.ended(2)[0].reason == "length"
    assert free(engine)


def test_too_many_failures_in_a_row_are_death(folder: Path) -> None:
    """After FATAL failed steps in a row the engine is dead, and says why."""

    def forward(*_: Any) -> Any:
        raise RuntimeError("broken for good")

    with driven(with_forward(open_engine(folder, small()), forward)) as line:
        for number in range(FATAL):
            line.send(asked(number, [5, 6]))
            assert line.ended(number)[0].reason == "error"
        died = line.wait(lambda reports: [one for one in reports if isinstance(one, Died)])
        assert "broken for good" in died[0].reason


def test_requests_that_fail_alone_are_no_failures_of_the_engine(folder: Path) -> None:
    """However many in a row: their steps went well."""
    engine = open_engine(folder, small())
    inner, broken = engine.machine.model.forward, [True]

    def forward(*given: Any) -> Any:
        logits, kv = inner(*given)
        return (logits * float("nan") if broken else logits), kv

    with driven(with_forward(engine, forward)) as line:
        for number in range(FATAL + 2):
            line.send(asked(number, [5, 6]))
            assert "not finite" in line.ended(number)[0].detail
        broken.clear()
        line.send(asked(99, [5, 6]))
        assert line.ended(99)[0].reason == "length"
    assert free(engine)


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_what_a_policy_raises_is_death(folder: Path, kind: type[BaseException]) -> None:
    """An engine whose policy raises can not go on, and says so, whatever it raises."""

    def policy(_state: Any) -> Any:
        raise kind("policy")

    with driven(open_engine(folder, small(), policy)) as line:
        line.send(asked(1, [5]))
        died = line.wait(lambda reports: [one for one in reports if isinstance(one, Died)])
        assert died[0].reason == f"{kind.__name__}: policy"


def test_the_state_is_json(folder: Path) -> None:
    """A look shows who runs and who holds which blocks, as JSON data."""
    engine = slowed(open_engine(folder, small()), 0.02)
    with driven(engine) as line:
        line.send(asked(1, [5] * 20, params=LONG))
        line.wait(lambda reports: any(isinstance(one, Turned) and one.tokens for one in reports))
        line.send(Look(4))
        (seen,) = line.wait(lambda reports: [one for one in reports if isinstance(one, Seen)])
        state = msgspec.json.decode(msgspec.json.encode(seen.state))
        (run,) = state["running"]
        assert run["prompt_tokens"] == 20
        assert run["num_blocks"] == state["blocks"]["referenced"] >= 2
        assert state["blocks"]["free"] + state["blocks"]["cached"] + state["blocks"]["referenced"] == 64
        line.send(Drop(1, "test"))
        line.ended(1)
