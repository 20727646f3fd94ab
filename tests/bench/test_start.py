"""A start in a new process, phase by phase."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from agentinfer.bench import start
from agentinfer.bench.start import child, startup
from agentinfer.build import Settings
from agentinfer.errors import AgentInferError
from tiny import write_tiny

SMALL = Settings(device="cpu", num_blocks=32)


def test_startup(tmp_path: Path) -> None:
    """The phases of a new process follow each other from its start to its first token, and add up."""
    (found,) = startup(write_tiny(tmp_path / "model"), SMALL)
    assert list(found)[:2] == ["interpreter", "imports"]
    assert list(found)[-3:] == ["engine", "first_token", "total"]
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) - found["total"] == pytest.approx(found["total"], abs=0.01)
    assert found["imports"] > 0.1


def test_a_start_that_fails(tmp_path: Path) -> None:
    """What the new process died of is in the error."""
    with pytest.raises(AgentInferError, match=r"status 1 and said: .*CheckpointError.*config.json"):
        startup(tmp_path, SMALL)


def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    """A start that is not over in time is an error."""
    with pytest.raises(AgentInferError, match=r"no first token after 0.01 s"):
        startup(tmp_path, SMALL, timeout_s=0.01)


def test_phases_that_the_builder_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the package's loggers with `phase` ends that phase; what comes after the last is the engine's."""
    folder, opened = write_tiny(tmp_path / "model"), start.open_engine

    def told(*given: object):
        engine = opened(*given)
        logging.getLogger("agentinfer.build").info("nothing ends here")
        time.sleep(0.02)
        return engine

    monkeypatch.setattr(start, "open_engine", told)
    logger = logging.getLogger("agentinfer")
    level, handlers = logger.level, list(logger.handlers)
    try:
        now = time.time()
        child(now, str(folder), json.dumps({"device": "cpu", "num_blocks": 32}), repr(now - 1))
    finally:
        logger.setLevel(level)
        logger.handlers = handlers
    found = json.loads(capsys.readouterr().out)
    phases = ["interpreter", "imports", "weights", "kv", "capture", "engine", "first_token", "total"]
    assert list(found) == phases
    assert found["interpreter"] == 1.0
    assert found["engine"] >= 0.02
