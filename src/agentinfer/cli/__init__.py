"""The command line: `agentinfer generate | chat | plan | env | replay | bench | demo`: above everything else.

Standard output holds what was asked for, standard error everything else. Exit status: 0 all went well; 1 a request was
refused or failed, or a replay disagrees; 2 wrong usage or a wrong model, with one line that says what and why; 130
interrupted; 141 nobody read the output to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130
"""As a shell reports a program that SIGINT ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: see `entry.main`. An interrupt is an exit status, while the rest is still imported too."""
    try:
        from agentinfer.cli import entry

        return entry.main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
