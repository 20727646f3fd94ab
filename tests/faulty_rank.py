"""Run in a child instead of its own main function: a rank that fails in a way of the test's choice."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from agentinfer import lead, ranks


def act(kind: str) -> None:
    """Fail."""
    match kind:
        case "raise":
            raise KeyError("out of luck")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1e6)
        case _:
            raise ValueError(kind)


def plant(kind: str, rank: int, step: int) -> None:
    """Make *rank* fail: in the launch of *step*, while it loads its weights if that is -1."""
    launch, build = lead.launch, ranks.build

    def faulty_launch(m: Any, device: Any, plan: Any) -> Any:
        if (m.ranks.tp.rank, plan.step) == (rank, step):
            act(kind)
        return launch(m, device, plan)

    def faulty_build(*args: Any, ranks: Any, **more: Any) -> Any:
        if (ranks.tp.rank, step) == (rank, -1):
            act(kind)
        return build(*args, ranks=ranks, **more)

    lead.launch, ranks.build = faulty_launch, faulty_build
    ranks.child()
