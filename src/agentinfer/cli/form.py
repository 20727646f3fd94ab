"""What form the flags say an output must have."""

from __future__ import annotations

import argparse
from pathlib import Path

from attrs import evolve

from agentinfer.cli.usage import Usage, flag
from agentinfer.errors import InvalidRequest
from agentinfer.state.request import SamplingParams
from agentinfer.state.structured import StructuredOutputsParams


def formed(args: argparse.Namespace, params: SamplingParams) -> SamplingParams:
    """*params*, with the form of the flags. Raises Usage for a file that can not be read, and for what is no form."""
    try:
        form = _form(args)
        return params if form is None else evolve(params, structured_outputs=form)
    except InvalidRequest as error:
        raise Usage(error) from error


def _form(args: argparse.Namespace) -> StructuredOutputsParams | None:
    if args.json_schema is not None:
        return StructuredOutputsParams(json=_read("json_schema", args.json_schema))
    if args.json_object:
        return StructuredOutputsParams(json_object=True)
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputsParams(choice=tuple(args.choice.split(",")))
    return None if args.grammar is None else StructuredOutputsParams(grammar=_read("grammar", args.grammar))


def _read(name: str, file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise Usage(f"{flag(name)}: {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Usage(f"{flag(name)}: {file}: is no UTF-8: {error}") from error
