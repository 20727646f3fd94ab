"""The HTTP side's end of the mail: who may come in, whose mail is whose, who has left. Of the event loop's thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from attrs import define, field, frozen

from agentinfer.loop import TokenLogprobs
from agentinfer.server.mail import (
    Accepted,
    Command,
    Died,
    Drop,
    Ended,
    Item,
    Judged,
    Look,
    Pause,
    Refused,
    Report,
    Seen,
    Submit,
    Turned,
)
from agentinfer.server.metrics import (
    Metrics,
    mean_output,
    note_end,
    note_phases,
    note_tokens,
    note_turn,
    observe,
    tokens_per_s,
)
from agentinfer.server.problems import Problem, engine_failed, unavailable

_MOST_RETRY_S = 600


@frozen
class Queues:
    """How much may wait for its first token."""

    max_sequences: int
    max_tokens: int


@define(eq=False)
class News:
    """Mutable until it is read: what has become of one sequence since it was read before."""

    index: int
    tokens: list[int] = field(factory=list[int])
    logprobs: list[TokenLogprobs] = field(factory=list[TokenLogprobs])
    """One a token, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ended: Ended | None = None


@define(eq=False)
class Course:
    """Mutable: how far one sequence has come."""

    item: Item
    count: int = 0
    """Tokens so far."""
    first_s: float | None = None
    """When the first one came; None: none did."""
    last_s: float | None = None
    """When the last one came."""
    queued: int = 0
    """Tokens that it counts for in the queue, until its first one comes."""
    over: bool = False
    ended: Ended | None = None
    """How the engine ended it; None: it did not, or nobody listened any more."""


@define(eq=False)
class Ticket:
    """Mutable: one request, from its submission to the end of its last sequence."""

    id: int
    name: str
    """What clients call it."""
    arrived_s: float
    courses: tuple[Course, ...]
    answer: asyncio.Future[Accepted | Refused]
    mail: dict[int, News] = field(factory=dict[int, News])
    """By the index of the sequence: a reader that is slow finds several tokens in one piece."""
    reader: asyncio.Future[None] | None = None
    """Who waits for mail, or for the engine's death."""
    farewell: Callable[[Ticket], None] | None = None
    """Called once when the request leaves."""


@define(eq=False)
class Desk:
    """Mutable: all requests that have not ended, and what is known of the engine."""

    post: Callable[[Command], None]
    queues: Queues
    metrics: Metrics = field(factory=Metrics)
    tickets: dict[int, Ticket] = field(factory=dict[int, Ticket])
    looks: dict[int, asyncio.Future[Seen]] = field(factory=dict[int, "asyncio.Future[Seen]"])
    next_id: int = 0
    num_queued: int = 0
    """Sequences without a first token."""
    tokens_queued: int = 0
    """That they will need."""
    paused: bool = False
    draining: bool = False
    dead: str | None = None
    """Why the engine can not go on."""
    departure: asyncio.Event = field(factory=asyncio.Event)
    """A ticket has left, or the engine has died."""
    death: asyncio.Event = field(factory=asyncio.Event)
    """The engine has died: `dead` says of what."""
    heard_s: float = 0.0
    """When the engine said anything, or was told to go on: time.monotonic."""


async def submit(desk: Desk, name: str, items: Sequence[Item]) -> Ticket:
    """Give *items* to the engine. Whoever calls this calls `leave` at the end, whatever happens.

    Raises Problem: the engine refuses an item (naming its field), too much waits already, or the server is going down.
    """
    check_open(desk)
    courses = tuple(Course(item, queued=_need(desk, item, j)) for item in items for j in range(item.params.n))
    new, most = sum(course.queued for course in courses), desk.queues.max_sequences
    if len(courses) > most:
        raise Problem(400, f"n: {len(courses)} sequences at once, but no more than {most} may wait", param="n")
    full = desk.num_queued + len(courses) > most
    if full or (desk.num_queued and desk.tokens_queued + new > desk.queues.max_tokens):
        waiting = f"{desk.num_queued} sequences with about {desk.tokens_queued} tokens wait already"
        raise unavailable(f"too busy: {waiting}", "overloaded", retry_after_s(desk))
    ticket = Ticket(desk.next_id, name, time.monotonic(), courses, asyncio.get_running_loop().create_future())
    desk.next_id += 1
    if not desk.tickets:
        desk.heard_s = ticket.arrived_s
    desk.tickets[ticket.id] = ticket
    desk.num_queued += len(courses)
    desk.tokens_queued += new
    try:
        desk.post(Submit(ticket.id, tuple(items)))
        answer = await ticket.answer
    except BaseException:
        leave(desk, ticket)
        raise
    if isinstance(answer, Accepted):
        return ticket
    for course in ticket.courses:
        course.over = True
    leave(desk, ticket)
    if answer.field is None:
        raise engine_failed(answer.message)
    which = f"item {answer.index}: " if len(items) > 1 else ""
    raise Problem(400, which + answer.message, param=answer.field)


def check_open(desk: Desk) -> None:
    """Raises Problem unless new requests are welcome."""
    if desk.dead is not None:
        raise unavailable(f"the engine has failed: {desk.dead}", "engine_dead")
    if desk.draining:
        raise unavailable("the server is shutting down", "shutting_down", 1)


def retry_after_s(desk: Desk) -> int:
    """Seconds until what waits now has been computed, at the speed that was measured."""
    speed = tokens_per_s(desk.metrics)
    wanted = math.ceil(desk.tokens_queued / speed) if speed > 0 else 1
    return min(max(wanted, 1), _MOST_RETRY_S)


def _need(desk: Desk, item: Item, index: int) -> int:
    """Tokens that sequence *index* of *item* will probably take: the prompt is computed once."""
    expected = mean_output(desk.metrics)
    most = item.params.max_tokens
    return (0 if index else len(item.prompt)) + math.ceil(expected if most is None else min(most, expected))


async def news(desk: Desk, ticket: Ticket) -> list[News]:
    """What has become of *ticket*'s sequences since the last time; waits until there is something.

    Raises Problem if the engine has died.
    """
    while not ticket.mail:
        if desk.dead is not None:
            raise engine_failed(f"the engine has failed: {desk.dead}")
        ticket.reader = asyncio.get_running_loop().create_future()
        await ticket.reader
    found, ticket.mail = ticket.mail, {}
    return list(found.values())


def _wake(ticket: Ticket) -> None:
    if ticket.reader is not None and not ticket.reader.done():
        ticket.reader.set_result(None)


def leave(desk: Desk, ticket: Ticket, reason: str = "the client has gone") -> None:
    """Nobody reads *ticket*'s mail any more: what still runs of it is aborted. Does nothing the second time."""
    if desk.tickets.pop(ticket.id, None) is None:
        return
    left = [course for course in ticket.courses if not course.over]
    if desk.dead is None and left:
        desk.post(Drop(ticket.id, reason))
    for course in ticket.courses:
        _unqueue(desk, course)
    for course in left:
        _over(desk, ticket, course, "abort", 0)
    desk.departure.set()
    if ticket.farewell is not None:
        ticket.farewell(ticket)


async def emptied(desk: Desk) -> None:
    """Wait until no request is left, or the engine is dead."""
    while desk.tickets and desk.dead is None:
        desk.departure.clear()
        await desk.departure.wait()


def _unqueue(desk: Desk, course: Course) -> None:
    if course.queued:
        desk.num_queued -= 1
        desk.tokens_queued -= course.queued
        course.queued = 0


def drop(desk: Desk, tickets: Iterable[Ticket], reason: str) -> None:
    """Abort *tickets* while their clients wait: they are told."""
    for ticket in tickets:
        desk.post(Drop(ticket.id, reason))


def pause(desk: Desk, *, paused: bool) -> None:
    """Let the engine rest, or go on."""
    desk.paused, desk.heard_s = paused, time.monotonic()
    desk.post(Pause(paused))


def silent_s(desk: Desk) -> float:
    """How long the engine has said nothing, although there are requests: each step says something."""
    return time.monotonic() - desk.heard_s if desk.tickets and not desk.paused else 0.0


async def look(desk: Desk) -> Seen:
    """The live state of the engine. Raises Problem if it is dead."""
    if desk.dead is not None:
        raise unavailable(f"the engine has failed: {desk.dead}", "engine_dead")
    number, desk.next_id = desk.next_id, desk.next_id + 1
    found = desk.looks[number] = asyncio.get_running_loop().create_future()
    desk.post(Look(number))
    try:
        return await found
    finally:
        del desk.looks[number]


def hear(desk: Desk, reports: Iterable[Report]) -> None:
    """Put what the engine said where it belongs."""
    now = desk.heard_s = time.monotonic()
    for report in reports:
        match report:
            case Turned():
                note_turn(desk.metrics, report)
                note_tokens(desk.metrics, len(report.tokens))
                logprobs = report.logprobs or repeat(None)
                columns = zip(report.ids, report.indices, report.tokens, logprobs, strict=False)
                for number, index, token, logprob in columns:
                    _grown(desk, number, index, (token,), () if logprob is None else (logprob,), None, now)
            case Ended():
                note_tokens(desk.metrics, len(report.tokens))
                _grown(desk, report.id, report.index, report.tokens, report.logprobs or (), report, now)
            case Judged():
                ticket = desk.tickets.get(report.id)
                if ticket is not None:
                    ticket.mail.setdefault(report.index, News(report.index)).prompt_logprobs = report.logprobs
            case Accepted() | Refused():
                ticket = desk.tickets.get(report.id)
                if ticket is not None and not ticket.answer.done():
                    ticket.answer.set_result(report)
            case Seen():
                found = desk.looks.get(report.id)
                if found is not None and not found.done():
                    found.set_result(report)
            case Died():
                _died(desk, report.reason)


def _died(desk: Desk, reason: str) -> None:
    desk.dead = reason
    futures = [*desk.looks.values(), *(ticket.answer for ticket in desk.tickets.values())]
    for future in futures:
        if not future.done():
            future.set_exception(unavailable(f"the engine has failed: {reason}", "engine_dead"))
    for ticket in desk.tickets.values():
        _wake(ticket)
    desk.departure.set()
    desk.death.set()


def _grown(
    desk: Desk,
    number: int,
    index: int,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    ended: Ended | None,
    now: float,
) -> None:
    """A sequence has new tokens, or has ended."""
    ticket = desk.tickets.get(number)
    if ticket is None:
        return
    course = ticket.courses[index]
    if tokens:
        _time(desk.metrics, ticket, course, now)
        course.count += len(tokens)
    if course.count or ended is not None:
        _unqueue(desk, course)
    mail = ticket.mail.get(index)
    if mail is None:
        mail = ticket.mail[index] = News(index)
    mail.tokens += tokens
    mail.logprobs += logprobs
    if ended is not None:
        mail.ended = course.ended = ended
        observe(desk.metrics.queued_s, ended.queued_s)
        if course.first_s is not None and course.last_s is not None:
            begun_s = ticket.arrived_s + ended.queued_s
            note_phases(desk.metrics, begun_s, course.first_s, course.last_s, course.count)
        _over(desk, ticket, course, ended.reason, ended.cached)
    _wake(ticket)


def _over(desk: Desk, ticket: Ticket, course: Course, reason: str, cached: int) -> None:
    course.over = True
    whole_s = time.monotonic() - ticket.arrived_s
    note_end(desk.metrics, reason, len(course.item.prompt), cached, course.count, whole_s)


def _time(metrics: Metrics, ticket: Ticket, course: Course, now: float) -> None:
    if course.last_s is None:
        course.first_s = now
        observe(metrics.first_s, now - ticket.arrived_s)
    else:
        observe(metrics.between_s, now - course.last_s)
    course.last_s = now
