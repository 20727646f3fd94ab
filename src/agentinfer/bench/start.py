"""A start: from a new process to its first token."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import attrs

from agentinfer.bench.measure import random_ids
from agentinfer.build import Settings
from agentinfer.errors import AgentInferError
from agentinfer.loop import generate, open_engine
from agentinfer.state.request import SamplingParams

_CHILD: Final = """
import sys, time
begin = time.time()
from agentinfer.bench.start import child
child(begin, *sys.argv[1:])
"""


def startup(folder: Path, settings: Settings, *, runs: int = 1, timeout_s: float = 600) -> list[dict[str, float]]:
    """Seconds of each phase from a new process to its first token, once a run.

    `interpreter`, `imports`, then whatever of `weights`, `kv` and `capture` the engine's builder logs the end of, the
    rest of it as `engine`, `first_token`, and `total`. Raises AgentInferError with the process's last words.
    """
    return [_start(folder, settings, timeout_s) for _ in range(runs)]


def _start(folder: Path, settings: Settings, timeout_s: float) -> dict[str, float]:
    command = [sys.executable, "-P", "-c", _CHILD, str(folder), json.dumps(attrs.asdict(settings)), repr(time.time())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s)  # noqa: S603 - this Python
    except subprocess.TimeoutExpired as error:
        raise AgentInferError(f"no first token after {timeout_s:g} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise AgentInferError(f"the new process ended with status {done.returncode} and said: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(begin: float, folder: str, settings: str, started: str) -> None:
    """What the new process does: print one JSON object, the seconds of each phase. *begin*: when Python ran."""
    marks = {"interpreter": begin, "imports": time.time()}
    logger = logging.getLogger("agentinfer")
    logger.setLevel(logging.INFO)
    logger.addHandler(_PhaseEnds(marks))
    engine = open_engine(folder, Settings(**json.loads(settings)))
    marks["engine"] = time.time()
    ids = random_ids(random.Random(0), 32, engine.machine.limits.vocab_size)
    (result,) = generate(engine, [ids], SamplingParams(max_tokens=1, temperature=0.0), progress=False)
    marks["first_token"] = time.time()
    if result.error is not None:
        raise AgentInferError(result.error)
    phases: dict[str, float] = {}
    before = float(started)
    for name, at in marks.items():
        phases[name], before = round(at - before, 3), at
    sys.stdout.write(json.dumps({**phases, "total": round(before - float(started), 3)}) + "\n")


class _PhaseEnds(logging.Handler):
    """Writes when the records that end a phase (`extra={"phase": NAME}`) were made. Mutable: the marks it was given."""

    def __init__(self, marks: dict[str, float]) -> None:
        super().__init__()
        self.marks = marks

    def emit(self, record: logging.LogRecord) -> None:
        """Note the end of a phase."""
        phase = getattr(record, "phase", None)
        if phase is not None:
            self.marks[phase] = record.created
