"""Everything that can happen to an engine, as a closed union of records. A trace is a sequence of these."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from agentinfer.state.ids import SeqId, tupled
from agentinfer.state.request import Request, check_seeds

VERSION = 2
"""Of the union: a trace of another version is refused."""


def _guesses(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple((seq, tuple(tokens)) for seq, tokens in value)


@frozen
class Arrived:
    """A client asked for something."""

    request: Request


@frozen
class Aborted:
    """A client lost interest."""

    seq: SeqId
    reason: str = ""


@frozen
class Stopped:
    """The text of the first `count` tokens that `seq` generated holds the stop string `text`: there it ends."""

    seq: SeqId
    count: int
    text: str


@frozen
class Forked:
    """Continue `seq` in as many more ways as there are seeds; None keeps the parent's seed. Raises InvalidRequest."""

    seq: SeqId
    seeds: tuple[int | None, ...] = field(default=(None,), converter=tupled)

    def __attrs_post_init__(self) -> None:
        check_seeds(self.seeds)


@frozen
class Swapped:
    """The weights are others from the next step on. `recompute`: what runs waits once more, for KV of theirs."""

    recompute: bool = False


@frozen
class Stepped:
    """`schedule` was called. Together with the state before, it names the plan.

    `drafts`: the guesses that the plan verifies, (sequence, tokens) each: see `speculate`.
    """

    drafts: tuple[tuple[SeqId, tuple[int, ...]], ...] = field(default=(), converter=_guesses)


@frozen
class Landed:
    """The tokens of a step are known. `bad`: indices of samples whose logits were not finite."""

    step: int
    tokens: tuple[int, ...] = field(converter=tuple)
    bad: tuple[int, ...] = field(default=(), converter=tuple)


@frozen
class Failed:
    """A step raised: its sequences end with the error."""

    step: int
    seqs: tuple[SeqId, ...] = field(converter=tuple)
    reason: str


@frozen
class Raised:
    """What `seq` asked the host to do with its logits raised: it ends with the error."""

    seq: SeqId
    reason: str


Event = Arrived | Aborted | Stopped | Forked | Swapped | Stepped | Landed | Failed | Raised
