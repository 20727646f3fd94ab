"""Any command, on a rank of torchrun that is not 0."""

from __future__ import annotations

import argparse
import os

from agentinfer.cli.launch import place_of, size_of, without_multicast
from agentinfer.cli.locate import locate
from agentinfer.cli.opened import one_line, settings_of
from agentinfer.cli.usage import Usage
from agentinfer.ranks import follow_rank
from agentinfer.text import eos_union, load_text


def run(args: argparse.Namespace) -> int:
    """Be the rank of torchrun that this process is, whatever rank 0 does with its engine; the exit status."""
    place = place_of(os.environ)
    if place is None:
        raise Usage("started by torchrun as another rank than 0, of one")
    size_of(args, place)
    without_multicast()
    with one_line(args):
        folder, settings = locate(args.model, weights=not args.dummy_weights), settings_of(args)
        eos = eos_union((), load_text(folder))
    follow_rank(folder, settings, eos, place, args.step_timeout)
    return 0
