"""`agentinfer replay`: a recorded run, lived through again. Needs no model, and no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from agentinfer.cli.usage import Usage
from agentinfer.errors import AgentInferError
from agentinfer.state.trace import Trace, encode_event, read_trace, verify


def run(args: argparse.Namespace) -> int:
    """0 if every digest agrees, 1 if one differs. Raises Usage if the file is no trace, or a damaged one."""
    trace = load_trace(args.file)
    began = perf_counter()
    try:
        differs = verify(trace)
    except (AgentInferError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise Usage(f"{args.file}: can not be lived through: {type(error).__name__}: {error}") from error
    seconds = perf_counter() - began
    if args.json:
        print(json.dumps({"events": len(trace.events), "agree": differs is None, "first_difference": differs}))
    elif differs is None:
        print(f"{len(trace.events)} events under {trace.policy}, {seconds:.2f} s: every digest agrees")
    else:
        event = json.dumps(encode_event(trace.events[differs]))
        shown = event if len(event) <= 200 else event[:197] + "..."
        print(f"event {differs} of {len(trace.events)}, line {differs + 2}: not the recorded state after it: {shown}")
    return 0 if differs is None else 1


def load_trace(path: Path) -> Trace:
    """The trace in the file *path*. Raises Usage naming the line that is wrong."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise Usage(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Usage(f"{path}: not a trace: {error}") from error
    lines: list[dict[str, Any]] = []
    for i, line in enumerate(text.splitlines(), 1):
        try:
            found: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Usage(f"{path}, line {i}: no valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise Usage(f"{path}, line {i}: no JSON object")
        lines.append(cast(dict[str, Any], found))
    try:
        return read_trace(lines)
    except (AgentInferError, ValueError, TypeError) as error:
        raise Usage(f"{path}: {error}") from error
