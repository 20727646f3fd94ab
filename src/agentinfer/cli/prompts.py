"""Prompts from flags and files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, cast

from agentinfer.cli.usage import Usage

Prompt = str | tuple[Any, ...]
"""A text, or what should be token ids: the engine refuses those that are none."""


def read_prompts(given: Iterable[tuple[str, Any]] | None) -> list[Prompt]:
    """The prompts of `--prompt`, `--prompt-ids` and `--prompts-file`, in their order. Raises Usage."""
    if given is None:
        raise Usage("generate: give --prompt, --prompt-ids or --prompts-file (see --help)")
    prompts: list[Prompt] = []
    for kind, value in given:
        prompts += read_file(value) if kind == "prompts_file" else [value]
    return prompts


def read_file(name: str) -> list[Prompt]:
    """The prompts in the JSON lines of *name*, `-` for standard input; blank lines are none.

    Raises Usage naming the file and the line: no JSON, neither or both of `prompt` and `prompt_ids`, anything else.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8-sig")
    except OSError as error:
        raise Usage(f"--prompts-file: {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Usage(f"--prompts-file: {name}: is no UTF-8: {error}") from error
    lines = text.split("\n")  # JSON strings may hold other line separators
    return [read_line(line, f"--prompts-file: {name}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def read_line(line: str, where: str) -> Prompt:
    """The prompt of one line. Raises Usage."""
    try:
        found: object = json.loads(line, object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Usage(f"{where}: no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise Usage(f'{where}: must be an object, {{"prompt": ...}} or {{"prompt_ids": [...]}}')
    fields = cast(dict[str, object], found)
    if len(fields) != 1 or fields.keys().isdisjoint({"prompt", "prompt_ids"}):
        raise Usage(f"{where}: must have prompt or prompt_ids and nothing else, not {sorted(fields)}")
    name, value = next(iter(fields.items()))
    if name == "prompt" and isinstance(value, str):
        return value
    if name == "prompt_ids" and isinstance(value, list):
        return tuple(cast(list[Any], value))
    raise Usage(f"{where}: {name} must be {'a text' if name == 'prompt' else 'a list'}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _number(given: str) -> float:
    value = float(given)
    if math.isinf(value):  # JSON could not be printed with it
        raise ValueError(f"{given} is no number that can be held")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
