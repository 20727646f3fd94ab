"""The one thread that owns the engine: commands in, steps, reports out. Knows nothing of HTTP, and waits for nobody.

* A step of the device that raises ends its own requests, and the next one goes on. After FATAL such steps in a row, and
  whatever else a step raises, the engine is dead: all are told, and the thread ends. What ends one request alone (its
  logits, its form, its function) is none of these.
* Commands are heard between two steps, so a request that nobody waits for holds its blocks for one step at most.
* Commands come in by `take_in`: what asks for a form waits in a thread of its own until its grammar is compiled.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from attrs import define, field, frozen

from agentinfer.errors import InvalidRequest
from agentinfer.grammar import FIELD, GrammarFailed, check_form
from agentinfer.loop import Engine, Finished, Output, Request, TokenLogprobs, check
from agentinfer.result import Note, sequences, shown, spelled
from agentinfer.server.mail import (
    Accepted,
    Command,
    Died,
    Drop,
    Ended,
    Judged,
    Look,
    Pause,
    Quit,
    Ready,
    Refused,
    Report,
    Seen,
    Submit,
    Turned,
)
from agentinfer.turn import EngineState, Event, Failed, Landed

FATAL: Final = 3
"""Steps that fail in a row, after which the engine counts as dead."""
IDLE_S: Final = 0.5
"""With nothing to do for so long, garbage is collected."""

Tell = Callable[[Sequence[Report]], None]


@frozen
class Place:
    """Which item of which request a sequence is."""

    id: int
    index: int


@define(eq=False)
class Driver:
    """Mutable: an engine, and who waits for what."""

    engine: Engine
    inbox: SimpleQueue[Command]
    tell: Tell
    places: dict[int, Place] = field(factory=dict[int, Place])
    """By the number of the sequence."""
    requests: dict[int, Request] = field(factory=dict[int, Request])
    told: dict[int, int] = field(factory=dict[int, int])
    """Tokens of each sequence that were told."""
    entered: dict[int, float] = field(factory=dict[int, float])
    """When each sequence came that has not been in a step yet: time.monotonic."""
    queued_s: dict[int, float] = field(factory=dict[int, float])
    """How long each of the others waited for its first step."""
    judged: dict[int, list[TokenLogprobs | None]] = field(factory=dict[int, "list[TokenLogprobs | None]"])
    """What is known of prompts that are not yet computed to their end."""
    paused: bool = False
    failures: int = 0
    """Steps in a row that failed."""
    failed: str = ""
    """Why the last of them did."""
    planned: int = -1
    """The last plan whose positions were counted."""
    dead: str | None = None
    """Why it can not go on."""


@define(eq=False)
class Intake:
    """Mutable: the way of commands to a driver. For one thread to call, besides the one of `forms`."""

    engine: Engine
    inbox: SimpleQueue[Command]
    tell: Tell
    forms: Executor
    """Of one thread: grammars are compiled one after the other."""
    compiling: dict[int, Submit] = field(factory=dict[int, Submit])
    """Requests whose grammar is not compiled yet."""


def take_in(intake: Intake, command: Command) -> None:
    """Give *command* to the driver, once the grammar that it may ask for is compiled and found by the engine."""
    match command:
        case Submit(id, items) if any(item.params.structured_outputs is not None for item in items):
            intake.compiling[id] = command
            intake.forms.submit(_compile, intake, command)
        case Drop(id) if intake.compiling.pop(id, None) is not None:
            pass  # it never comes to the driver
        case _:
            intake.inbox.put(command)


def _compile(intake: Intake, asked: Submit) -> None:
    refused = None
    for index, item in enumerate(asked.items):
        try:
            check_form(intake.engine.grammars, Request(item.prompt, item.params))
        except InvalidRequest as error:
            refused = Refused(asked.id, index, error.field, str(error))
            break
        except BaseException as error:  # noqa: BLE001 - who waits is told, whatever a compiler in Rust raises
            refused = Refused(asked.id, index, None, f"{type(error).__name__}: {error}")
            break
    if intake.compiling.pop(asked.id, None) is None:
        return  # nobody waits for it any more
    if refused is None:
        intake.inbox.put(asked)
    else:
        intake.tell([refused])


def drive(driver: Driver) -> None:
    """Hear commands and step, until Quit or the engine's death. For a thread of its own; raises nothing."""
    driver.engine.note = partial(_counting, driver, driver.engine.note)
    try:
        while True:
            commands = _heard(driver)
            if any(isinstance(command, Quit) for command in commands):
                break
            for command in commands:
                _obey(driver, command)
            if driver.engine.unfinished and not driver.paused:
                _turn(driver)
    except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must be told
        driver.dead = f"{type(error).__name__}: {error}"
        driver.tell([Died(driver.dead)])


def _heard(driver: Driver) -> list[Command]:
    """The commands that have come; where there is nothing to do, wait for one."""
    commands: list[Command] = []
    if not driver.engine.unfinished or driver.paused:
        try:
            commands.append(driver.inbox.get(timeout=IDLE_S))
        except Empty:
            gc.collect()
            commands.append(driver.inbox.get())
    while not driver.inbox.empty():  # this thread alone takes
        commands.append(driver.inbox.get())
    return commands


def _obey(driver: Driver, command: Command) -> None:
    match command:
        case Submit():
            _submit(driver, command)
        case Drop(id, reason):
            gone = [(seq, place) for seq, place in driver.places.items() if place.id == id]
            for seq, _ in gone:
                driver.engine.abort(seq, reason)  # pyright: ignore[reportArgumentType] - a SeqId, from `add`
            driver.tell([_end(driver, seq, place, "abort", reason) for seq, place in gone])
        case Pause(paused):
            driver.paused = paused
        case Look(id):
            driver.tell([Seen(id, facts(driver.engine))])
        case Quit() | Ready():
            pass


def _submit(driver: Driver, asked: Submit) -> None:
    """All of its items, or none."""
    requests: list[Request] = []
    for index, item in enumerate(asked.items):
        try:
            requests.append(spelled(driver.engine.text, Request(item.prompt, item.params, item.salt)))
            check(driver.engine, requests[-1])
        except InvalidRequest as error:
            driver.tell([Refused(asked.id, index, error.field, str(error))])
            return
    driver.tell([Accepted(asked.id)])
    index, now = 0, time.monotonic()
    for request in requests:
        for seq in sequences(driver.engine.add(request), request):
            driver.places[seq], driver.requests[seq], driver.told[seq] = Place(asked.id, index), request, 0
            driver.entered[seq] = now
            if request.params.prompt_logprobs is not None and len(request.prompt) == 1:
                driver.tell([Judged(asked.id, index, [None])])  # nothing is before its only token
            index += 1


def _turn(driver: Driver) -> None:
    """One step of the engine. Raises whatever makes it useless."""
    engine = driver.engine
    began = time.monotonic()
    output = engine.step()
    busy_s = time.monotonic() - began
    plan, num_positions, num_preempted = engine.world.state.last, 0, 0
    if plan is not None and plan.step > driver.planned:
        driver.planned, num_positions, num_preempted = plan.step, len(plan.slots), len(plan.preempted)
        if driver.entered:
            for seq in driver.entered.keys() & plan.seqs.tolist():
                driver.queued_s[seq] = began - driver.entered.pop(seq)
    state = engine.world.state
    finished = () if output is None else output.finished
    turned = Turned(
        *_grown(driver, output, {done.seq for done in finished}),
        busy_s,
        num_positions,
        len(state.waiting) + len(state.requeued),
        len(state.order),
        state.pool.num_available,
        num_preempted,
    )
    driver.tell([*_judged(driver, output), turned, *_ends(driver, finished)])
    if driver.failures >= FATAL:
        raise RuntimeError(f"{FATAL} steps in a row failed, the last with {driver.failed}")


Grown = tuple[list[int], list[int], list[int], list[TokenLogprobs | None] | None]


def _grown(driver: Driver, output: Output | None, over: Collection[int]) -> Grown:
    """The columns of Turned: tokens of sequences that are not *over*, whose ends have the rest."""
    ids: list[int] = []
    indices: list[int] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    if output is None:
        return ids, indices, tokens, None
    for i, (seq, token) in enumerate(zip(output.seqs.tolist(), output.tokens.tolist(), strict=True)):
        place = driver.places.get(seq)
        if place is None or seq in over:
            continue
        ids.append(place.id)
        indices.append(place.index)
        tokens.append(token)
        driver.told[seq] += 1
        if output.logprobs is not None:
            logprobs.append(output.logprobs[i])
    return ids, indices, tokens, None if output.logprobs is None else logprobs


def _judged(driver: Driver, output: Output | None) -> list[Report]:
    """The log-probabilities of prompts that *output* completes."""
    reports: list[Report] = []
    for seq, first, logprobs in () if output is None else output.prompt_logprobs:
        place = driver.places.get(seq)
        if place is None:
            continue
        found = driver.judged.setdefault(seq, [None] * len(driver.requests[seq].prompt))
        found[first : first + len(logprobs)] = logprobs
        if first + len(logprobs) == len(found):
            whole = driver.judged.pop(seq)
            reports += [Judged(place.id, place.index + j, whole) for j in range(driver.requests[seq].params.n)]
    return reports


def _ends(driver: Driver, finished: Iterable[Finished]) -> list[Report]:
    reports: list[Report] = []
    for done in finished:
        place = driver.places.get(done.seq)
        if place is None:
            continue
        told, hidden = driver.told[done.seq], len(done.output) - len(shown(done))
        logprobs = None if done.logprobs is None else done.logprobs[told:]
        detail, at_fault = _blamed(done)
        reports.append(
            _end(
                driver,
                done.seq,
                place,
                done.reason,
                detail,
                done.output[told:],
                hidden,
                done.cached,
                logprobs,
                at_fault,
            )
        )
    return reports


def _blamed(done: Finished) -> tuple[str, str | None]:
    """Why *done* ended, and the field that is at fault: a form that compiles, but of which a mask can not be made."""
    kind, _, words = done.detail.partition(": ")
    form = kind in (GrammarFailed.__name__, InvalidRequest.__name__) and words.startswith(FIELD)
    return (words, FIELD) if done.reason == "error" and form else (done.detail, None)


def _end(
    driver: Driver,
    seq: int,
    place: Place,
    reason: str,
    detail: str,
    tokens: tuple[int, ...] = (),
    hidden: int = 0,
    cached: int = 0,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    at_fault: str | None = None,
) -> Ended:
    del driver.places[seq], driver.told[seq], driver.requests[seq]
    driver.judged.pop(seq, None)
    now = time.monotonic()
    queued_s = driver.queued_s.pop(seq, None) or now - driver.entered.pop(seq, now)
    return Ended(place.id, place.index, tokens, hidden, reason, detail, cached, logprobs, queued_s, at_fault)


def _counting(driver: Driver, before: Note, event: Event, state: EngineState) -> None:
    """A note of the engine, which counts steps that fail."""
    match event:
        case Failed():
            driver.failures, driver.failed = driver.failures + 1, event.reason
        case Landed():
            driver.failures = 0
        case _:
            pass
    before(event, state)


def facts(engine: Engine) -> dict[str, Any]:
    """The live state, as JSON data: who waits, who runs, who holds which blocks."""
    state = engine.world.state
    pool, cols, limits = state.pool, state.cols, state.limits
    running = [
        {
            "seq": run.seq,
            "row": run.row,
            "prompt_tokens": len(run.request.prompt),
            "computed": int(cols.computed[run.row]),
            "length": int(cols.length[run.row]),
            "limit": int(cols.limit[run.row]),
            "num_blocks": len(run.blocks),
        }
        for run in state.rows
        if run is not None
    ]
    waiting = [{"seq": w.seq, "tokens": len(w.tokens)} for w in (*state.requeued, *state.waiting)]
    return {
        "step": state.step,
        "waiting": waiting,
        "running": running,
        "blocks": {
            "size": limits.block_size,
            "total": limits.num_blocks,
            "free": len(pool.free),
            "cached": len(pool.cached),
            "referenced": int((pool.refs > 0).sum()),
        },
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
    }
