"""The flags of how many answers there are, and of what is said of their tokens. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

MODES: Final = ("raw_logprobs", "processed_logprobs")


def said_flags(parser: argparse.ArgumentParser, integer: Callable[[int], Callable[[str], int]]) -> None:
    """Add them to *parser*. *integer*: (least) -> what reads an integer."""
    group = parser.add_argument_group("answers (with --json)")
    group.add_argument(
        "--n", metavar="N", type=integer(1), default=1, help="answers to each prompt; above 1 needs a temperature"
    )
    group.add_argument(
        "--logprobs",
        metavar="K",
        type=integer(0),
        help="say how likely each token was, and which K tokens were likeliest",
    )
    group.add_argument(
        "--prompt-logprobs", metavar="K", type=integer(0), help="the same of each token of the prompt but the first"
    )
    group.add_argument(
        "--logprobs-mode",
        choices=MODES,
        default=MODES[0],
        help="by the model alone, or by what tokens were drawn from: after temperature, filters and all else "
        "(default: %(default)s)",
    )
