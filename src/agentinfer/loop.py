"""Engine, and the ways to drive it: run, generate, stream, or three calls of your own. The only clock and queues."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import define, evolve, field

from agentinfer.build import Settings, build
from agentinfer.errors import AgentInferError, CheckpointError, InvalidRequest
from agentinfer.grammar import Grammars, check_form, mask_of
from agentinfer.result import (
    Completion,
    Delta,
    Note,
    Prompt,
    Reader,
    Result,
    Tale,
    caught_up,
    heard,
    joined,
    refused,
    result_of,
    sequences,
    silent,
    spelled,
    stopped,
    tale_of,
    tell,
    token_ids,
    without,
)
from agentinfer.said import Said, SaidOf, collected, inherited, rewound
from agentinfer.sampling import Processor
from agentinfer.state.admit import validate
from agentinfer.state.engine import EngineState, has_work, initial, live, tokens_of
from agentinfer.state.event import Aborted, Arrived, Event, Forked, Swapped
from agentinfer.state.history import fold
from agentinfer.state.ids import SeqId
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.plan import Output
from agentinfer.state.policy import Policy
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.sequence import Finished
from agentinfer.steps import Device, Machine
from agentinfer.text import Text, eos_union, load_text
from agentinfer.turn import Planner, World, advance, landed, planned, recovered, settle


@define(eq=False)
class Engine:
    """The one mutable thing: a machine and the world it works on.

    Three calls make a loop of your own: `add` a request, `step` while `unfinished`, read each step's Output. Streams,
    `run`, `generate` and such a loop may take turns on one engine: each gets its own tokens and ends, whoever steps.
    """

    machine: Machine
    world: World
    text: Text | None
    """The checkpoint's tokenizer and chat template; None: it speaks in token ids only."""
    grammars: Grammars
    """What the forms that requests ask for mean in its tokens."""
    note: Note = silent
    """Told of what a step did once it is sure; one that raises is told the same event again."""
    lead: Note = silent
    """Told of each event at once, of Stepped before that step is launched: how rank 0 tells the other ranks (lead.py).
    What it raises ends the step.
    """
    others: Callable[[Mapping[str, Any]], AbstractContextManager[object]] = nullcontext
    """Has the other ranks do what no state knows of, beside this one for the time of a block (lead.py)."""
    planner: Planner = planned
    """How steps are planned: speculative.py has another way."""
    names: dict[str, SeqId] = field(factory=dict[str, SeqId])
    """Sequences that clients named themselves."""
    groups: dict[SeqId, int] = field(factory=dict[SeqId, int])
    """The `n` of requests for more than one completion, by the first sequence of each."""
    news: deque[tuple[Event, EngineState]] = field(factory=deque[tuple[Event, EngineState]])
    """What `note` has still to be told."""
    kept: deque[Output] = field(factory=deque[Output])
    """What `step` has still to give: of a step that raised, or of sequences that whoever stepped did not wait for."""
    boxes: dict[SeqId, list[Finished]] = field(factory=dict[SeqId, list[Finished]])
    """Where the end of a sequence goes for which `run` or `stream` waits."""
    readers: Mapping[SeqId, Reader] = field(factory=dict[SeqId, Reader])
    """Of the live sequences that stop strings can end."""
    said: SaidOf = field(factory=dict[SeqId, Said])
    """The log-probabilities of the live sequences' tokens."""

    def __repr__(self) -> str:
        state = self.world.state
        waiting = len(state.requeued) + len(state.waiting)
        model = self.machine.model.name
        return f"<Engine of {model}: {waiting} waiting, {len(state.order)} running, step {state.step}>"

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting, running or in flight, or its end has not been told yet."""
        return bool(self.kept) or _busy(self.world)

    def add(self, request: Request, name: str | None = None) -> SeqId:
        """Queue *request*; the first of its sequences (see `sequences`).

        Raises InvalidRequest if it can never be served, or if *name* is that of a live one.
        """
        request = spelled(self.text, request)
        check(self, request)
        if name is not None and name in self.names and _alive(self, self.names[name]):
            raise InvalidRequest("request_id", f"{name!r} is in use by a request that has not ended")
        seq = SeqId(self.world.state.next_seq)
        self._hear(Arrived(request))
        if request.params.n > 1:
            self.groups[seq] = request.params.n
        if name is not None:
            self.names[name] = seq
        return seq

    def abort(self, seq: SeqId, reason: str = "") -> None:
        """End *seq*, and with the first sequence of a request all others of it; no matter which have ended already."""
        for one in _group(self, seq):
            self._hear(Aborted(one, reason))

    def fork(self, seq: SeqId, seeds: Sequence[int | None] = (None,)) -> tuple[SeqId, ...]:
        """Continue *seq* once more for each of *seeds*. Empty if it is not live any more.

        Raises InvalidRequest for what SamplingParams would not take as a seed.
        """
        first = self.world.state.next_seq
        self._hear(Forked(seq, seeds))
        return tuple(SeqId(child) for child in range(first, self.world.state.next_seq))

    def step(self) -> Output | None:
        """Give the first of the outputs that are kept; if there are none, advance once.

        Raises AgentInferError if the policy serves nobody although there is work. What a policy or a note raises, and
        an interrupt (KeyboardInterrupt), leaves an engine that can go on: the step is planned again, and the tokens of
        the one before it are kept for the next call.
        """
        _tell(self)
        if self.kept:
            return self.kept.popleft()
        output = _turn(self)
        self.kept.clear()  # of this very output
        return output

    def land(self) -> None:
        """Land what is in flight; `step` gives what that brings."""
        note = partial(_note_later, self)
        _keep(self, _enter(self, *landed(self.world, note), note))
        _tell(self)

    def swapped(self, *, recompute: bool = False) -> None:
        """Go on with the machine's weights, which are others: see `swap_weights`, which makes them so."""
        self._hear(Swapped(recompute))

    def reset(self, state: EngineState) -> None:
        """Go on from *state*, which is `rewind(old, engine.world.state)`. What is in flight lands into nothing.

        Raises AgentInferError for a state whose KV may not be what the device holds: of another step than the present,
        or one in which sequences run. A trace can not say this: begin another one.
        """
        now = self.world
        if self.machine.ranks.tp.size > 1:
            raise AgentInferError("an engine of several ranks can not be reset: the others would not know")
        if state.step != now.state.step or len(state.order):
            raise AgentInferError(
                f"a state of step {state.step}, {len(state.order)} sequences running, does not fit the device's KV at "
                f"step {now.state.step}: give rewind(state, engine.world.state)"
            )
        if now.flight is not None:
            settle(now.state, now.flight)
        self.world = World(state, now.device, None)
        self.kept.clear()
        left = live(state)
        self.readers, self.said = caught_up(self.text, state), rewound(self.said, state)
        self.boxes = {seq: box for seq, box in self.boxes.items() if seq in left}
        waiting = (*state.requeued, *state.waiting)
        self.groups = {w.seq: w.request.params.n for w in waiting if w.request.params.n > 1}

    def _hear(self, event: Event) -> None:
        before = self.world.state
        state = fold(before, (event,))
        self.lead(event, state)
        self.world = evolve(self.world, state=state)
        new = range(before.next_seq, state.next_seq)
        self.readers, self.said = heard(self.readers, event, new), inherited(self.said, event, new)
        self.news.append((event, state))
        _tell(self)


def _group(engine: Engine, first: SeqId) -> tuple[SeqId, ...]:
    """The sequences that are *first*'s request."""
    return tuple(SeqId(first + i) for i in range(engine.groups.get(first, 1)))


def _alive(engine: Engine, first: SeqId) -> bool:
    """Whether any of them has not ended."""
    return not live(engine.world.state).isdisjoint(_group(engine, first))


def _busy(world: World) -> bool:
    """Whether stepping can still bring something."""
    return has_work(world.state) or world.flight is not None or bool(world.state.ended)


def _turn(engine: Engine) -> Output | None:
    """Advance once. Ends go where they are waited for, and what nobody waits for is kept, too."""
    before, note = engine.world, partial(_note_later, engine)
    try:
        output = _enter(engine, *advance(engine.machine, before, note=note, planner=engine.planner), note)
    except BaseException:
        engine.news.clear()  # of a step that never was
        output = _enter(engine, *recovered(before, note), note)
        _keep(engine, output)
        _tell(engine)
        raise
    _keep(engine, output)
    _tell(engine)
    if output is None and engine.world.flight is None and has_work(engine.world.state) and before.flight is None:
        raise AgentInferError("nothing is running and the policy admits none of those that wait")
    return output


def _note_later(engine: Engine, event: Event, state: EngineState) -> None:
    """A Note of a step that is not sure yet."""
    engine.lead(event, state)
    engine.news.append((event, state))


def _enter(engine: Engine, world: World, output: Output | None, note: Note) -> Output | None:
    """Go on from *world*; the output, with the ends that stop strings in it bring."""
    state, output, readers = stopped(engine.text, engine.readers, world.state, output, note)
    output, said = collected(engine.said, output)
    engine.world, engine.readers, engine.said = World(state, world.device, world.flight), readers, said
    return output


def _keep(engine: Engine, output: Output | None) -> None:
    if output is None:
        return
    rest = without(output, engine.boxes.keys()) if engine.boxes else output
    if rest is not None:
        engine.kept.append(rest)
    for done in output.finished:
        box = engine.boxes.pop(done.seq, None)
        if box is not None:
            box.append(done)
    if output.finished and (engine.names or engine.groups):
        engine.names = {name: seq for name, seq in engine.names.items() if _alive(engine, seq)}
        engine.groups = {seq: n for seq, n in engine.groups.items() if _alive(engine, seq)}


def _tell(engine: Engine) -> None:
    while engine.news:
        engine.note(*engine.news[0])
        engine.news.popleft()


def open_engine(
    folder: str | Path,
    settings: Settings | None = None,
    policy: Policy | None = None,
    note: Note = silent,
    processors: Mapping[str, Processor] = MappingProxyType({}),
) -> Engine:
    """An engine for the model in *folder* (see find_model). *policy*: a function of yours instead of the named one.
    *processors*: functions of yours on logits, by the name that requests give (see agentinfer.sampling).

    Raises CheckpointError for what is wrong with the folder, InvalidSetting for what is wrong with the settings.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; find_model gives the folder of a hub id, and of 'demo'")
    text = load_text(folder)
    machine, device = build(folder, Settings() if settings is None else settings, eos_union((), text), policy)
    return start(evolve(machine, host=evolve(machine.host, processors=processors)), device, text, note)


def start(machine: Machine, device: Device, text: Text | None = None, note: Note = silent) -> Engine:
    """An engine with nothing to do."""
    grammars = Grammars(text, machine.limits)
    machine = evolve(machine, host=evolve(machine.host, mask=partial(mask_of, grammars)))
    return Engine(machine, World(initial(machine.limits), device, None), text, grammars, note)


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    progress: bool | None = None,
) -> list[Result]:
    """Complete *prompts* together, in their order. A prompt that is refused fails alone: its `error` says why.

    *progress*: a bar on standard error; None: if that is a terminal.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts")
    results: dict[int, Result] = {}
    asked: dict[int, Request] = {}
    for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
        ids: tuple[int, ...] = ()
        try:
            ids = token_ids(engine.text, prompt)
            request = spelled(engine.text, Request(ids, chosen))
            check(engine, request)
        except InvalidRequest as error:
            results[i] = refused(i, ids, getattr(chosen, "n", 1), error)  # of what is no SamplingParams: 1
        else:
            asked[i] = request
    places = {seq: i for i, request in asked.items() for seq in sequences(engine.add(request), request)}
    ends: dict[SeqId, Finished] = {}
    with _bar(len(places), progress) as bar:
        for done in run(engine, places):
            ends[done.seq] = done
            bar.update()
    for i in asked:
        results[i] = result_of(engine.text, [ends[seq] for seq in places if places[seq] == i], i)
    return [results[i] for i in range(len(prompts))]


def run(engine: Engine, seqs: Iterable[SeqId]) -> Iterator[Finished]:
    """Step until all of *seqs* have ended, giving each as it ends; what is left is aborted if the caller stops.

    Raises AgentInferError naming a sequence that is not live, or for which somebody waits already.
    """
    left = dict.fromkeys(seqs)
    box = _box_of(engine, left)
    try:
        while left:
            if not box:
                _drive(engine, left)
                continue
            done = box.pop(0)
            del left[done.seq]
            yield done
    finally:
        for seq in left:
            engine.abort(seq, "the caller stopped listening")


def _box_of(engine: Engine, seqs: Collection[SeqId]) -> list[Finished]:
    """The list to which the ends of *seqs* come, whoever steps. Raises AgentInferError if one will not come there."""
    state = engine.world.state
    box = [done for output in engine.kept for done in output.finished if done.seq in seqs]
    told = {done.seq for done in box}
    coming = {*live(state), *(done.seq for done in state.ended), *told}
    for seq in seqs:
        if seq not in coming:
            raise AgentInferError(f"sequence {seq} is not live: it was never given out, rewound, or its end was told")
        if seq in engine.boxes:
            raise AgentInferError(f"sequence {seq} is one that somebody waits for already")
    engine.boxes |= {seq: box for seq in seqs if seq not in told}
    claimed = frozenset(seqs)
    engine.kept = deque(rest for output in engine.kept if (rest := without(output, claimed)) is not None)
    return box


def _drive(engine: Engine, left: Collection[SeqId]) -> None:
    """Advance once for who waits for *left*."""
    first = next(iter(left))
    if first not in engine.boxes or not _busy(engine.world):
        raise AgentInferError(f"sequence {first} is not live any more: no end of it will come")
    _tell(engine)
    _turn(engine)


def stream(engine: Engine, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Generator[Delta]:
    """Complete *prompt*, piece by piece; never half a character. Closing the iterator aborts the request.

    With `n` completions their pieces alternate: Delta.index says whose each is. Raises InvalidRequest at the first
    piece if the prompt is refused.
    """
    request = Request(token_ids(engine.text, prompt), params)
    seqs = sequences(engine.add(request), request)
    left = {seq: tale_of(request, i) for i, seq in enumerate(seqs)}
    box, ends, whole = _box_of(engine, seqs), dict[SeqId, Finished](), dict[int, Completion]()
    try:
        while left:
            news = _news(engine, left, box)
            if not news:
                _drive(engine, left)
            for seq, tokens, said, done in news:
                left[seq], delta = tell(engine.text, left[seq], tokens, said, done)
                if done is not None and delta.completion is not None:
                    ends[seq], whole[delta.index] = done, delta.completion
                    del left[seq]
                yield (
                    delta
                    if left
                    else evolve(delta, result=joined(ends[seqs[0]], [whole[i] for i in range(len(seqs))], 0))
                )
    finally:
        for seq in left:
            engine.abort(seq, "the caller stopped listening")


def _news(
    engine: Engine, left: Mapping[SeqId, Tale], box: list[Finished]
) -> list[tuple[SeqId, tuple[int, ...], tuple[TokenLogprobs, ...] | None, Finished | None]]:
    """(sequence, tokens, what was said of them, its end) for each of *left* of which there is something to tell."""
    over = {done.seq: done for done in box}
    box.clear()
    found: list[tuple[SeqId, tuple[int, ...], tuple[TokenLogprobs, ...] | None, Finished | None]] = []
    for seq, tale in left.items():
        done = over.get(seq)
        if done is not None:
            found.append((seq, done.output[tale.told :], done.logprobs and done.logprobs[tale.told :], done))
        elif tokens := _tokens_since(engine.world.state, seq, tale.prompt + tale.told):
            said = engine.said.get(seq)
            news = None
            if said is not None and len(said.output):  # of its tokens, not of its prompt alone
                news = tuple(said.output.between(tale.told, tale.told + len(tokens)))
            found.append((seq, tokens, news, None))
    return found


def _tokens_since(state: EngineState, seq: SeqId, first: int) -> tuple[int, ...]:
    try:
        return tokens_of(state, seq, first)
    except KeyError:  # its end is on the way
        return ()


def check(engine: Engine, request: Request) -> None:
    """Refuse what *engine* can never serve. Raises InvalidRequest naming the field."""
    validate(engine.machine.limits, request)
    if request.params.stop and engine.text is None:
        raise InvalidRequest("stop", "is text, but the checkpoint has no tokenizer; give stop_token_ids")
    for name in request.params.logits_processors:
        if name not in engine.machine.host.processors:
            there = ", ".join(engine.machine.host.processors) or "none"
            raise InvalidRequest("logits_processors", f"{name!r} is none that the engine was opened with ({there})")
    check_form(engine.grammars, request)


def _bar(total: int, progress: bool | None):  # noqa: ANN202 - tqdm's own class, which has no stubs
    from tqdm import tqdm

    quiet = not sys.stderr.isatty() if progress is None else not progress
    return tqdm(total=total, disable=quiet, unit="request", file=sys.stderr)
