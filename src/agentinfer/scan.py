"""Marks (stop strings, tags) in a text that comes in pieces. Pure, and what is found does not depend on the cuts.

The mark that ends first is found; of several that end there, the longest. Text that may still become a mark is held
back, and not a character more.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen


@frozen
class Scanned:
    """A text, cut at its first mark."""

    before: str
    """What belongs to no mark."""
    mark: str | None
    rest: str
    """What comes after the mark; without one, the end that may be the beginning of a mark."""


def scan(marks: Iterable[str], held: str, piece: str) -> Scanned:
    """The first of *marks* in *held* + *piece* that ends in *piece*. No mark is empty."""
    marks, text = tuple(marks), held + piece
    found = [(at + len(m), at, m) for m in marks if (at := text.find(m, max(0, len(held) - len(m) + 1))) >= 0]
    if found:
        end, at, mark = min(found)
        return Scanned(text[:at], mark, text[end:])
    at = undecided(marks, text)
    return Scanned(text[:at], None, text[at:])


def undecided(marks: Iterable[str], text: str) -> int:
    """Where the longest end of *text* begins that is the beginning of one of *marks*, and no whole one."""
    first = len(text)
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= at < first and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if 0 <= at < first:
            first = at
    return first
