"""How many ranks a command runs, and which of them this process is: alone, with children, or one of torchrun's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agentinfer.cli.usage import Broken, Usage, complain

if TYPE_CHECKING:
    from agentinfer.build import Settings
    from agentinfer.loop import Engine
    from agentinfer.ranks import Place

_RUN_ID = "TORCHELASTIC_RUN_ID"


def follows(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process as a rank that only follows rank 0."""
    return _RUN_ID in environ and environ.get("RANK", "0") != "0"


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where torchrun put this process; None if it did not start it: RANK and its like are then not looked at.

    Raises Usage for a variable of torchrun that is missing or no number.
    """
    if _RUN_ID not in environ or environ.get("WORLD_SIZE") == "1":
        return None
    from agentinfer.ranks import Place

    try:
        rank = int(environ["RANK"])
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        return Place(
            rank=rank,
            size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            serve=rank == 0 and not agent,
            run=f"agentinfer/{environ[_RUN_ID]}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )
    except (KeyError, ValueError) as error:
        raise Usage(f"started by torchrun, but its variables are not right: {error!r}") from error


def size_of(args: argparse.Namespace, place: Place | None) -> int:
    """How many ranks share the model. Raises Usage where --tp and torchrun do not agree."""
    started = 1 if place is None else place.size
    tp = started if args.tp is None else args.tp
    if place is not None and tp != started:
        raise Usage(f"--tp: {tp}, but torchrun started {started} ranks")
    return tp


@contextmanager
def launched(args: argparse.Namespace, folder: Path, settings: Settings) -> Generator[Engine]:
    """Rank 0's engine, with as many other ranks as *args* or torchrun want.

    Raises what open_ranks does, Usage, and Broken for a rank that is lost.
    """
    place = place_of(os.environ)
    tp = size_of(args, place)
    if tp == 1:
        from agentinfer.loop import open_engine

        yield open_engine(folder, settings)
        return
    without_multicast()
    from agentinfer.ops.comm import RankLost
    from agentinfer.ranks import open_ranks

    try:
        with open_ranks(folder, settings, tp, place, step_timeout_s=args.step_timeout, leave=_leave) as engine:
            yield engine
    except RankLost as error:
        raise Broken(error) from error


def without_multicast() -> None:
    """Let torch share memory between GPUs without multicast, here and in processes to come, unless the environment has
    said how: nothing here needs it, and on a shared host it can take GPUs out of service.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def _leave(cause: str) -> NoReturn:
    complain(cause)
    os._exit(1)
