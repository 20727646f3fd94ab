"""What the HTTP side and the engine's thread tell each other: plain data, which msgspec can carry between processes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from agentinfer.loop import SamplingParams, TokenLogprobs

# --- to the engine ---------------------------------------------------------------------------------------------------


class Item(Struct, frozen=True):
    """A prompt, to be continued in `params.n` ways. Immutable."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None = None


class Submit(Struct, frozen=True, tag=True):
    """Generate all of *items*, or none of them: Accepted or Refused comes first. Immutable. What comes then names the
    sequences by an index: those of the first item, then those of the next one.
    """

    id: int
    items: tuple[Item, ...]


class Drop(Struct, frozen=True, tag=True):
    """Nobody waits for this request any more. Immutable."""

    id: int
    reason: str


class Pause(Struct, frozen=True, tag=True):
    """Step no more (*paused*), or go on. Immutable."""

    paused: bool


class Look(Struct, frozen=True, tag=True):
    """Asks for Seen. Immutable."""

    id: int


class Quit(Struct, frozen=True, tag=True):
    """End the thread. Immutable."""


class Ready(Struct, frozen=True, tag=True):
    """Requests are answered now. Immutable. From an HTTP side in a process of its own."""


Command = Submit | Drop | Pause | Look | Quit | Ready

# --- from the engine -------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, tag=True):
    """All items of a request have arrived. Immutable."""

    id: int


class Refused(Struct, frozen=True, tag=True):
    """A request can never be served: its item *index* is why. Immutable."""

    id: int
    index: int
    field: str | None
    """Of the request; None: it is the server's fault."""
    message: str


class Turned(Struct, frozen=True, tag=True):
    """A step has landed. Immutable. `ids`, `indices` and `tokens` are columns, an element a new token."""

    ids: list[int]
    indices: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    """Likewise; None: nobody asks."""
    busy_s: float
    """The step took so long."""
    num_positions: int
    """It computed so many."""
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_preempted: int


class Judged(Struct, frozen=True, tag=True):
    """How likely the tokens of a prompt are, None for the first. Immutable. Comes before the first token."""

    id: int
    index: int
    logprobs: list[TokenLogprobs | None]


class Ended(Struct, frozen=True, tag=True):
    """A sequence has ended. Immutable."""

    id: int
    index: int
    tokens: tuple[int, ...]
    """Those that no Turned had, and will not have."""
    num_hidden: int
    """So many of the last tokens have no text: an end token."""
    reason: str
    detail: str
    cached: int
    """Prompt tokens whose KV was found instead of computed."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One of each of `tokens`; None: not asked for."""
    queued_s: float = 0.0
    """From its arrival to its first step."""
    field: str | None = None
    """Of an error: the field of the request that is at fault; None: none is."""


class Seen(Struct, frozen=True, tag=True):
    """The live state, as JSON data. Immutable."""

    id: int
    state: dict[str, Any]


class Died(Struct, frozen=True, tag=True):
    """The engine can not go on. Immutable. The last report."""

    reason: str


Report = Accepted | Refused | Turned | Judged | Ended | Seen | Died
