"""From arguments to an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from agentinfer.cli.flags import make_parser
from agentinfer.cli.launch import follows
from agentinfer.cli.usage import Broken, Usage, complain
from agentinfer.errors import AgentInferError

UNREAD = 141
"""As a shell reports a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. *argv*: without the program's name; None: those of this process.

    Raises SystemExit(0) after `--help` and `--version`, as argparse does; no other exception for what a user can cause.
    """
    if sys.stderr is None:  # closed by who started this process
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        complain("standard output is closed")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can not show a character shows another
    try:
        try:
            return run(make_parser().parse_args(argv))
        finally:  # after --help, too
            sys.stdout.flush()
    except Usage as error:
        complain(error)
        return 2
    except Broken as error:
        complain(error)
        return 1
    except BrokenPipeError:
        _silence()
        return UNREAD
    except (AgentInferError, OSError) as error:  # the engine can not go on, or standard output is full
        complain(error)
        _silence()
        return 1


def run(args: argparse.Namespace) -> int:
    """Run the command that *args* name. Its module, and what it needs, is imported now and not before."""
    if follows(os.environ) and hasattr(args, "step_timeout"):
        from agentinfer.cli import follow

        return follow.run(args)
    match args.command:
        case "generate":
            from agentinfer.cli import generate as command
        case "chat" if args.url is not None:
            from agentinfer.cli import chat_url as command
        case "chat":
            from agentinfer.cli import chat as command
        case "serve":
            from agentinfer.cli import serve as command
        case "plan":
            from agentinfer.cli import plan as command
        case "env":
            from agentinfer.cli import env as command
        case "bench" if args.bench == "serve":
            from agentinfer.cli import bench_serve as command
        case "bench":
            from agentinfer.cli import bench as command
        case "replay":
            from agentinfer.cli import replay as command
        case _:
            from agentinfer.cli import demo as command
    return command.run(args)


def _silence() -> None:
    """If standard output can not be written any more, let the interpreter's last flush go nowhere."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
