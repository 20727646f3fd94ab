"""What was said of the tokens of live sequences: log-probabilities, gathered from outputs until their end. Pure.

The loop keeps it beside the state, whose decisions do not depend on it, and gives every output to `collected`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import evolve, field, frozen

from agentinfer.state.engine import EngineState
from agentinfer.state.event import Event, Forked
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.log import Log
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.plan import Output
from agentinfer.state.sequence import Finished


@frozen(eq=False)
class Said:
    """Of one sequence."""

    output: Log[TokenLogprobs] = field(factory=Log[TokenLogprobs])
    """One a token, if its request asks for that."""
    prompt: Mapping[int, TokenLogprobs] = MappingProxyType({})
    """By position, likewise."""


SaidOf = Mapping[SeqId, Said]
"""Of the live sequences of which anything was said."""


def collected(said: SaidOf, output: Output | None) -> tuple[Output | None, SaidOf]:
    """*output*, whose ends tell all that was said of them, and what is said of those that go on."""
    if output is None or not (said or output.logprobs or output.prompt_logprobs or any(map(_asks, output.finished))):
        return output, said
    now = dict(said)
    for seq, first, pieces in output.prompt_logprobs:
        before = now.get(seq) or Said()
        now[seq] = evolve(before, prompt={**before.prompt, **dict(enumerate(pieces, first))})
    for seq, one in zip(map(SeqId, ints(output.seqs)), output.logprobs or (), strict=False):
        if one is not None:
            before = now.get(seq) or Said()
            now[seq] = Said(before.output.append(one), before.prompt)
    ends = tuple(_with(done, now.pop(done.seq, None)) for done in output.finished)
    return evolve(output, finished=ends), now


def _asks(done: Finished) -> bool:
    return done.request.params.logprobs is not None or done.request.params.prompt_logprobs is not None


def _with(done: Finished, said: Said | None) -> Finished:
    params, count = done.request.params, len(done.output)
    said = said or Said()
    if params.logprobs is not None:
        done = evolve(done, logprobs=tuple(said.output.between(0, min(count, len(said.output)))))
    if params.prompt_logprobs is not None:
        done = evolve(done, prompt_logprobs=tuple(said.prompt.get(i) for i in range(len(done.request.prompt))))
    return done


def inherited(said: SaidOf, event: Event, new: Iterable[int]) -> SaidOf:
    """*said* after *event*, by which the sequences *new* came into being: a fork's have their parent's tokens."""
    parent = said.get(event.seq) if isinstance(event, Forked) else None
    return said if parent is None else {**said, **dict.fromkeys(map(SeqId, new), Said(parent.output))}


def rewound(said: SaidOf, state: EngineState) -> SaidOf:
    """What is said of those that wait in *state*, an older one: of tokens that are gone nothing, of tokens that ended
    meanwhile and came back that nothing is known.
    """
    found: dict[SeqId, Said] = {}
    for waiting in (*state.requeued, *state.waiting):
        before = said.get(waiting.seq) or Said()
        output = waiting.tokens[len(waiting.request.prompt) :]
        tokens = () if waiting.request.params.logprobs is None else output
        known = before.output.between(0, min(len(before.output), len(tokens)))
        lost = (TokenLogprobs(token, math.nan, 0, (), ()) for token in tokens[len(known) :])
        found[waiting.seq] = Said(Log([*known, *lost]), before.prompt)
    return found
