"""Errors that end a command, and the one line that says them."""

from __future__ import annotations

import sys


class Usage(Exception):
    """Wrong usage or a wrong model: exit status 2."""


class Broken(Exception):
    """What was begun can not be ended: exit status 1."""


def line(error: object) -> str:
    """What *error* says, in one line."""
    said = " ".join(str(error).split())
    return said or type(error).__name__


def complain(error: object) -> None:
    """Say *error* on standard error, in one line."""
    print(f"agentinfer: {line(error)}", file=sys.stderr)


def hint(words: str) -> None:
    """Say *words* on standard error if somebody watches: if it is a terminal."""
    if sys.stderr.isatty():
        complain(words)


def flag(name: str) -> str:
    """The flag that sets the field *name*."""
    return "--" + name.replace("_", "-")
