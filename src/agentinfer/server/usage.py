"""Token counts, as answers say them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, field

from agentinfer.server.desk import Ticket
from agentinfer.server.protocol import StreamOptions
from agentinfer.server.voice import Piece


@define(eq=False)
class Count:
    """Mutable: the tokens of one answer so far."""

    prompt: int
    """Of all its prompts, each once."""
    per_prompt: int
    """Choices of each prompt."""
    prompts: tuple[int, ...]
    """Prompt tokens of each choice."""
    outputs: dict[int, int] = field(factory=dict[int, int])
    """Tokens of each choice."""
    cached: dict[int, int] = field(factory=dict[int, int])
    """Prompt tokens that were found, by choice."""
    shown: bool = True
    """False: what was generated was not asked for."""


def count_of(ticket: Ticket, per_prompt: int, *, shown: bool = True) -> Count:
    """The start of an answer with *per_prompt* choices of each prompt."""
    sizes = tuple(len(course.item.prompt) for course in ticket.courses)
    return Count(sum(sizes[::per_prompt]), per_prompt, sizes, shown=shown)


def note(count: Count, pieces: Iterable[Piece]) -> None:
    """Count *pieces*."""
    for piece in pieces:
        count.outputs[piece.index] = piece.count if count.shown else 0
        if piece.finish is not None:
            count.cached[piece.index] = piece.cached


def usage(count: Count) -> dict[str, Any]:
    """Of the whole answer. What is cached is that of each prompt's first choice: the others find it by themselves."""
    output = sum(count.outputs.values())
    cached = sum(n for index, n in count.cached.items() if index % count.per_prompt == 0)
    return {
        "prompt_tokens": count.prompt,
        "total_tokens": count.prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_of_choice(count: Count, index: int) -> dict[str, Any]:
    """Of choice *index* so far."""
    prompt, output = count.prompts[index], count.outputs.get(index, 0)
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def with_usage(chunk: dict[str, Any], options: StreamOptions, count: Count, index: int) -> dict[str, Any]:
    """A chunk of a stream, with as much about usage as its *options* ask for."""
    if options.include_usage:
        chunk["usage"] = usage_of_choice(count, index) if options.continuous_usage_stats else None
    return chunk


def last_chunk(head: dict[str, Any], options: StreamOptions, count: Count) -> list[dict[str, Any]]:
    """The chunk after all choices, if the stream's *options* ask for it."""
    return [{**head, "choices": [], "usage": usage(count)}] if options.include_usage else []
