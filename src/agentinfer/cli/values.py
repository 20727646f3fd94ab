"""Readers of what flags are given: numbers, token ids, spans, URLs. Each raises argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from urllib.parse import urlsplit


def integer(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Reads an integer of at least *least*, and at most *most*."""

    def read(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            rule = f"in [{least}, {most}]" if most < math.inf else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"must be an integer {rule}, not {given!r}")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads a number in [low, high]; in (low, high] if *above*."""

    def read(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value) or (above and value == low):
            ends = f"{'(' if above else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
            raise argparse.ArgumentTypeError(f"must be a number in {ends}, not {given!r}")
        return value

    return read


def token_ids(given: str) -> tuple[int, ...]:
    """Reads `1,2,3`; nothing is no ids."""
    try:
        return tuple(int(part) for part in given.split(",")) if given.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids with commas between them, not {given!r}") from None


def counts(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads `1,64,256`: integers of at least *least*; nothing is none of them."""
    one = integer(least)

    def read(given: str) -> tuple[int, ...]:
        return tuple(one(part) for part in given.split(",")) if given.strip() else ()

    return read


def span(given: str) -> tuple[int, int]:
    """Reads `100-1024` or `128`: the shortest and the longest."""
    low, dash, high = given.partition("-")
    found = integer(1)(low), integer(1)(high if dash else low)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"must be SHORTEST-LONGEST, not {given!r}")
    return found


def web_address(given: str) -> str:
    """Reads a URL of http or https."""
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"must be http://HOST:PORT/PATH, or https, not {given!r}")
    return given
