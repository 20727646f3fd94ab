"""advance, and the ways to drive it: run, generate, stream, or three calls of your own. The only clock and queues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from attrs import define, evolve, field, frozen

from agentinfer.build import Settings, build
from agentinfer.errors import AgentInferError, InvalidRequest
from agentinfer.ops.kv import renew
from agentinfer.state.admit import validate
from agentinfer.state.commit import commit, flush
from agentinfer.state.engine import EngineState, has_work, initial
from agentinfer.state.event import Aborted, Arrived, Event, Failed, Forked, Landed, Stepped
from agentinfer.state.history import fold
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.plan import Output
from agentinfer.state.policy import Policy
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import rebase, schedule
from agentinfer.state.sequence import Finished
from agentinfer.steps import Device, Flight, Machine, land, launch
from agentinfer.text import Text, decode, encode, eos_union, feed, flush_text, load_text, new_decoder

Note = Callable[[Event, EngineState], None]
"""Told of each event and the state after it: a trace is what it was told."""


def silent(_event: Event, _state: EngineState) -> None:
    """Note nothing."""


@frozen(eq=False)
class World:
    """All that changes: the control plane's state, the device's memory, and the step in flight."""

    state: EngineState
    device: Device
    flight: Flight | None


def advance(m: Machine, world: World, events: Iterable[Event] = (), note: Note = silent) -> tuple[World, Output | None]:
    """One turn of the engine: hear *events*, plan and launch a step, land the one before it.

    The output is of the step that landed, and of whatever else ended; None: nothing did. Without overlap the
    step before lands first. Never raises for what a step does: its requests end with the error.
    """
    state, flight, output = world.state, world.flight, None
    for event in events:
        state = fold(state, (event,))
        note(event, state)
    if flight is not None and not m.overlap:
        state, output = settle(state, flight, note)
        flight = None
    state, plan = schedule(state, m.policy)
    launched, device = None, world.device
    if plan is not None:
        note(Stepped(), state)
        launched, device = launch(m, device, rebase(state, plan, device.kv.step))
        if isinstance(launched, Failed):
            state = fold(state, (launched,))
            note(launched, state)
            launched = None
    if flight is not None:
        state, output = settle(state, flight, note)
    if output is None:
        state, output = flush(state)
    return World(state, device, launched), output


def settle(state: EngineState, flight: Flight, note: Note = silent) -> tuple[EngineState, Output | None]:
    """*state* after *flight* has landed, or failed to."""
    result = land(flight)
    if isinstance(result, Failed):
        state, output = fold(state, (result,)), None
        note(result, state)
        return state, output
    bad = tuple(i for i, ok in enumerate(result.ok.tolist()) if not ok)
    state, output = commit(state, flight.plan, result)
    note(Landed(flight.plan.step, tuple(ints(result.tokens)), bad), state)
    return state, output


def recovered(world: World) -> World:
    """*world*, whose device was given to a step that never came back. What was in flight has landed."""
    state = world.state
    if world.flight is not None:
        state, output = settle(state, world.flight)
        state = state if output is None else evolve(state, ended=output.finished)
    kv = renew(world.device.kv, "a step that was interrupted")
    return World(state, evolve(world.device, kv=kv), None)


@define(eq=False)
class Engine:
    """The one mutable thing: a machine and the world it works on.

    Three calls make a loop of your own: `add` a request, `step` while `unfinished`, read each step's Output.
    """

    machine: Machine
    world: World
    text: Text | None
    """The checkpoint's tokenizer and chat template; None: it speaks in token ids only."""
    note: Note = silent
    names: dict[str, SeqId] = field(factory=dict[str, SeqId])
    """Live sequences that clients named themselves."""

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting, running or in flight, or its end has not been told yet."""
        state = self.world.state
        return has_work(state) or self.world.flight is not None or bool(state.ended)

    def add(self, request: Request, name: str | None = None) -> SeqId:
        """Queue *request*. Raises InvalidRequest if it can never be served, or if *name* is that of a live one."""
        validate(self.machine.limits, request)
        if name is not None and name in self.names:
            raise InvalidRequest("request_id", f"{name!r} is in use by a request that has not ended")
        seq = SeqId(self.world.state.next_seq)
        self._hear(Arrived(request))
        if name is not None:
            self.names[name] = seq
        return seq

    def abort(self, seq: SeqId, reason: str = "") -> None:
        """End *seq*; no matter if it has ended already."""
        self._hear(Aborted(seq, reason))

    def fork(self, seq: SeqId, seeds: Sequence[int | None] = (None,)) -> tuple[SeqId, ...]:
        """Continue *seq* once more for each of *seeds*. Empty if it is not live any more."""
        first = self.world.state.next_seq
        self._hear(Forked(seq, tuple(seeds)))
        return tuple(SeqId(child) for child in range(first, self.world.state.next_seq))

    def step(self) -> Output | None:
        """Advance once. Raises AgentInferError if the policy serves nobody although there is work.

        An interrupt (KeyboardInterrupt) leaves an engine that can go on: the interrupted step is planned again.
        """
        before = self.world
        try:
            self.world, output = advance(self.machine, before, note=self.note)
        except BaseException:
            self.world = recovered(before)
            raise
        if output is None and self.world.flight is None and has_work(self.world.state) and before.flight is None:
            raise AgentInferError("nothing is running and the policy admits none of those that wait")
        if output is not None and self.names:
            over = {done.seq for done in output.finished}
            self.names = {name: seq for name, seq in self.names.items() if seq not in over}
        return output

    def reset(self, state: EngineState) -> None:
        """Go on from *state*, an earlier one made current by `rewind`, say. What is in flight lands into nothing.

        A trace can not say this: begin another one.
        """
        if self.world.flight is not None:
            settle(self.world.state, self.world.flight)
        self.world = World(state, self.world.device, None)

    def _hear(self, event: Event) -> None:
        state = fold(self.world.state, (event,))
        self.world = evolve(self.world, state=state)
        self.note(event, state)


def open_engine(
    folder: str | Path, settings: Settings | None = None, policy: Policy | None = None, note: Note = silent
) -> Engine:
    """An engine for the model in *folder*. *policy*: a function of yours instead of the named one.

    Raises CheckpointError for what is wrong with the folder, InvalidSetting for what is wrong with the settings.
    """
    folder = Path(folder)
    text = load_text(folder)
    machine, device = build(folder, Settings() if settings is None else settings, eos_union((), text), policy)
    return start(machine, device, text, note)


def start(machine: Machine, device: Device, text: Text | None = None, note: Note = silent) -> Engine:
    """An engine with nothing to do."""
    return Engine(machine, World(initial(machine.limits), device, None), text, note)


@frozen
class Result:
    """What became of one prompt."""

    index: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """An end or stop token included."""
    text: str | None
    """The output without its end token; None without a tokenizer."""
    finish_reason: str
    cached_tokens: int
    """Prompt tokens whose KV was found instead of computed."""
    error: str | None


Prompt = str | Sequence[int]


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
    places: dict[SeqId, int] = {}
    for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
        ids: tuple[int, ...] = ()
        try:
            ids = token_ids(engine.text, prompt)
            places[engine.add(Request(ids, chosen))] = i
        except InvalidRequest as error:
            results[i] = Result(i, ids, (), None, "rejected", 0, str(error))
    with _bar(len(places), progress) as bar:
        for done in run(engine, places):
            results[places[done.seq]] = result_of(engine.text, done, places[done.seq])
            bar.update()
    return [results[i] for i in range(len(prompts))]


def run(engine: Engine, seqs: Iterable[SeqId]) -> Iterator[Finished]:
    """Step until all of *seqs* have ended, giving each as it ends; what is left is aborted if the caller stops."""
    left = set(seqs)
    try:
        while left:
            output = engine.step()
            for done in output.finished if output is not None else ():
                if done.seq in left:
                    left.discard(done.seq)
                    yield done
    finally:
        for seq in left:
            engine.abort(seq, "the caller stopped listening")


@frozen
class Delta:
    """A piece of one stream."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None
    """On the last piece: the whole."""


def stream(engine: Engine, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Generator[Delta]:
    """Complete *prompt*, piece by piece; never half a character. Closing the iterator aborts the request.

    Raises InvalidRequest at the first piece if the prompt is refused.
    """
    seq = engine.add(Request(token_ids(engine.text, prompt), params))
    decoder, live = new_decoder(), True
    try:
        while live:
            output = engine.step()
            if output is None:
                continue
            done = next((one for one in output.finished if one.seq == seq), None)
            tokens = tuple(
                token for one, token in zip(ints(output.seqs), ints(output.tokens), strict=True) if one == seq
            )
            live = done is None
            piece = ""
            shown = tokens[:-1] if done is not None and done.reason == "stop" else tokens
            if engine.text is not None:
                decoder, piece = feed(engine.text, decoder, shown)
                piece += flush_text(engine.text, decoder) if done is not None else ""
            if tokens or done is not None:
                yield Delta(piece, tokens, None if done is None else result_of(engine.text, done, 0))
    finally:
        if live:
            engine.abort(seq, "the caller stopped listening")


def token_ids(text: Text | None, prompt: Prompt) -> tuple[int, ...]:
    """The prompt as token ids. Raises InvalidRequest if it is text and there is no tokenizer."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if text is None:
        raise InvalidRequest("prompt", "is text, but the checkpoint has no tokenizer; give token ids")
    return encode(text, prompt)


def result_of(text: Text | None, done: Finished, index: int) -> Result:
    """*done*, for the client that asked."""
    ids = done.output
    shown = ids[:-1] if done.reason == "stop" else ids
    words = None if text is None else decode(text, shown)
    error = done.detail if done.reason in ("error", "rejected", "abort") else None
    return Result(index, done.request.prompt, ids, words, done.reason, done.cached, error)


def _bar(total: int, progress: bool | None):  # noqa: ANN202 - tqdm's own class, which has no stubs
    from tqdm import tqdm

    quiet = not sys.stderr.isatty() if progress is None else not progress
    return tqdm(total=total, disable=quiet, unit="request", file=sys.stderr)
