"""The desk: who may come in, when to come back, and whose mail is whose."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentinfer.server.desk import Desk, Queues, Ticket, hear, leave, news, retry_after_s, silent_s, submit
from agentinfer.server.mail import Accepted, Command, Died, Drop, Ended, Item, Submit, Turned
from agentinfer.server.metrics import mean_output, note_turn, tokens_per_s
from agentinfer.server.problems import Problem
from agentinfer.state.request import SamplingParams


def turned(ids: list[int], indices: list[int], tokens: list[int], positions: int = 0, busy_s: float = 0.0) -> Turned:
    return Turned(ids, indices, tokens, None, busy_s, positions, 0, 0, 10, 0)


def items(count: int, prompt: int = 10, **params: Any) -> list[Item]:
    return [Item((5,) * prompt, SamplingParams(**{"max_tokens": 20, **params})) for _ in range(count)]


class Engine:
    """Mutable: takes commands, and accepts whatever comes."""

    def __init__(self) -> None:
        self.posted: list[Command] = []
        self.desk = Desk(self.post, Queues(4, 200))

    def post(self, command: Command) -> None:
        self.posted.append(command)
        if isinstance(command, Submit):
            hear(self.desk, [Accepted(command.id)])

    async def submit(self, asked: list[Item]) -> Ticket:
        return await submit(self.desk, "x", asked)


def test_when_to_come_back_is_what_waits_by_the_speed() -> None:
    """Retry-After is queued tokens / measured tokens a busy second, at least 1, at most 600, and 1 while unknown."""

    async def run() -> None:
        engine = Engine()
        desk = engine.desk
        await engine.submit(items(2, 40))
        assert (desk.num_queued, desk.tokens_queued) == (2, 120)
        assert retry_after_s(desk) == 1
        note_turn(desk.metrics, turned([], [], [], positions=80, busy_s=4.0))
        assert tokens_per_s(desk.metrics) == 20
        assert retry_after_s(desk) == 6
        for _ in range(50):
            note_turn(desk.metrics, turned([], [], [], positions=1, busy_s=100.0))
        assert retry_after_s(desk) == 600

    asyncio.run(run())


def test_the_queue_is_bounded_and_empties() -> None:
    """Sequences and tokens count until the first token, the end or the departure of each; then there is room again."""

    async def run() -> None:
        engine = Engine()
        desk = engine.desk
        first = await engine.submit(items(1, n=3, temperature=1.0))
        assert (desk.num_queued, desk.tokens_queued) == (3, 10 + 3 * 20)
        with pytest.raises(Problem) as full:
            await engine.submit(items(2))
        assert (full.value.status, full.value.code) == (503, "overloaded")
        assert "Retry-After" in full.value.headers
        with pytest.raises(Problem) as long:
            await engine.submit(items(1, 150))
        assert long.value.status == 503
        hear(desk, [turned([first.id], [0], [7])])
        assert (desk.num_queued, desk.tokens_queued) == (2, 40)
        hear(desk, [Ended(first.id, 1, (8,), 0, "length", "", 0)])
        assert desk.num_queued == 1
        leave(desk, first)
        leave(desk, first)
        assert (desk.num_queued, desk.tokens_queued, desk.tickets) == (0, 0, {})
        assert [one for one in engine.posted if isinstance(one, Drop)] == [Drop(first.id, "the client has gone")]
        assert desk.metrics.finished == {"length": 1, "abort": 2}
        assert mean_output(desk.metrics) == 2 / 3

    asyncio.run(run())


def test_a_slow_reader_finds_all_in_one_piece() -> None:
    """Mail that was not read is joined by sequence; what is read is told once."""

    async def run() -> None:
        engine = Engine()
        desk = engine.desk
        ticket = await engine.submit(items(2))
        hear(desk, [turned([ticket.id] * 2, [0, 1], [17, 20])])
        hear(desk, [turned([ticket.id, 99], [0, 0], [18, 1]), Ended(ticket.id, 1, (2,), 1, "stop", "", 3)])
        found = {one.index: (one.tokens, one.ended is not None) for one in await news(desk, ticket)}
        assert found == {0: ([17, 18], False), 1: ([20, 2], True)}
        hear(desk, [turned([ticket.id], [0], [19])])
        assert [one.tokens for one in await news(desk, ticket)] == [[19]]
        waiting = asyncio.create_task(news(desk, ticket))
        await asyncio.sleep(0)
        hear(desk, [Died("planted")])
        with pytest.raises(Problem, match="planted"):
            await waiting
        with pytest.raises(Problem) as dead:
            await engine.submit(items(1))
        assert dead.value.code == "engine_dead"

    asyncio.run(run())


def test_what_can_not_be_posted_waits_for_nothing() -> None:
    """A command that can not be told leaves no request behind: none that would be waited for, or take up room."""

    async def run() -> None:
        engine = Engine()

        def post(command: Command) -> None:
            if isinstance(command, Submit):
                raise OverflowError("planted")

        engine.desk.post = post
        with pytest.raises(OverflowError, match="planted"):
            await engine.submit(items(2))
        assert (engine.desk.tickets, engine.desk.num_queued, engine.desk.tokens_queued) == ({}, 0, 0)

    asyncio.run(run())


def test_a_request_says_farewell_once() -> None:
    """When it leaves it knows when its sequences began, and how the engine ended those that it did."""

    async def run() -> None:
        engine, gone = Engine(), list[Any]()
        ticket = await engine.submit(items(2))
        ticket.farewell = gone.append
        end = Ended(ticket.id, 1, (2,), 0, "length", "", 3, queued_s=0.25)
        hear(engine.desk, [turned([ticket.id] * 2, [0, 1], [17, 20]), end])
        hear(engine.desk, [turned([ticket.id], [0], [18])])
        assert not gone
        leave(engine.desk, ticket)
        leave(engine.desk, ticket)
        assert gone == [ticket]
        begun, ended = ticket.courses
        assert begun.first_s is not None
        assert ticket.arrived_s < begun.first_s < (begun.last_s or 0)
        assert (begun.ended, ended.ended) == (None, end)
        assert engine.desk.metrics.queued_s.sum == 0.25

    asyncio.run(run())


def test_times_are_told_apart() -> None:
    """From the first step to the first token is prefill, from there to the last one decode; together, inference."""

    async def run() -> None:
        engine = Engine()
        ticket = await engine.submit(items(1))
        hear(engine.desk, [turned([ticket.id], [0], [17])])
        (course,), m = ticket.courses, engine.desk.metrics
        ticket.arrived_s, course.first_s, course.last_s = (time.monotonic() - ago_s for ago_s in (8.0, 4.0, 4.0))
        hear(engine.desk, [Ended(ticket.id, 0, (18, 19), 0, "length", "", 0, queued_s=1.0)])
        sums = [one.sum for one in (m.prefill_s, m.decode_s, m.inference_s, m.per_token_s)]
        assert sums == pytest.approx([3, 4, 7, 2], abs=0.3)
        leave(engine.desk, ticket)
        untouched = await engine.submit(items(1))
        hear(engine.desk, [Ended(untouched.id, 0, (), 0, "abort", "", 0, queued_s=1.0)])
        assert sum(m.decode_s.counts) == 1

    asyncio.run(run())


def test_silence_counts_only_while_something_is_asked() -> None:
    """An engine with nothing to do, or that was told to rest, is not silent."""

    async def run() -> None:
        engine = Engine()
        assert silent_s(engine.desk) == 0
        ticket = await engine.submit(items(1))
        assert 0 < silent_s(engine.desk) < 5
        engine.desk.heard_s -= 100
        assert silent_s(engine.desk) > 99
        engine.desk.paused = True
        assert silent_s(engine.desk) == 0
        engine.desk.paused = False
        leave(engine.desk, ticket)
        assert silent_s(engine.desk) == 0

    asyncio.run(run())
