"""The flags that say what form an output must have."""

from __future__ import annotations

import argparse
from pathlib import Path


def form_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to *parser*: one of them at most may be given."""
    group = parser.add_argument_group("form of the output", "one at most; needs the extra `structured`")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", type=Path, help="JSON of the schema in FILE")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    one.add_argument("--regex", metavar="R", help="a text that matches the regular expression R")
    one.add_argument("--choice", metavar="A,B", help="one of these texts, which have commas between them")
    one.add_argument("--grammar", metavar="FILE", type=Path, help="a text of the Lark grammar in FILE")
