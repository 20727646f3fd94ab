"""MODEL on the command line: what `find_model` finds, with its words and bars for who watches."""

from __future__ import annotations

import sys
from pathlib import Path

from agentinfer.cli.usage import Usage, complain
from agentinfer.errors import AgentInferError


def locate(model: str, *, weights: bool = True) -> Path:
    """The folder of *model*, fetched first if need be; without *weights*, from the hub only the small files are.

    Raises Usage saying where it was looked for.
    """
    from agentinfer.find import find_model

    watched = sys.stderr.isatty()
    try:
        return find_model(model, weights=weights, progress=complain if watched else _silent, bars=watched)
    except AgentInferError as error:
        raise Usage(error) from error


def demo_folder(*, quiet: bool) -> Path:
    """The demo model, fetched and converted the first time, with words about it unless *quiet*. Raises Usage."""
    from agentinfer.find import find_demo

    try:
        return find_demo(_silent if quiet else complain)
    except AgentInferError as error:
        raise Usage(error) from error


def _silent(_: str) -> None:
    """Nobody watches."""
