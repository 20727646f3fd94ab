"""A server in a process of its own, treated badly: see serve_faults.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from serve_faults import HANG_S, STREAM, rounds, served


@pytest.mark.parametrize("more", [["--no-http-process"], []], ids=["one process", "two"])
def test_nothing_leaks_and_nothing_hangs(folder: Path, more: list[str]) -> None:
    """After clients that left, bodies that were none, slow ones, steps that raised and SIGTERM nothing is left."""
    found = rounds(str(folder), more, seed=1, clients=40, bodies=50, alone=True)
    assert (found["hung"], found["exit"]) == (0, 0)
    assert found["done"]
    assert found["left"]


@pytest.mark.slow
def test_nothing_leaks_on_two_ranks(folder: Path) -> None:
    """The same where rank 0 serves and another rank follows; a step that raises there ends all, with status 1."""
    found = rounds(str(folder), ["--tp", "2"], seed=2, clients=60, bodies=50, alone=False)
    assert (found["hung"], found["exit"], found["exit_after_a_lost_rank"]) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("more", [["--no-http-process"], []], ids=["one process", "two"])
def test_a_rank_that_is_lost_ends_the_server(folder: Path, number: signal.Signals, more: list[str]) -> None:
    """When another rank dies or stops, whoever waits is told within seconds, the status is 1, no process is left."""
    with served(str(folder), ["--tp", "2", "--step-timeout", "3", *more]) as server:
        children = psutil.Process(server.process.pid).children()
        (child,) = [one for one in children if "agentinfer.server.apart" not in one.cmdline()]
        answers: list[httpx.Response | httpx.HTTPError] = []

        def ask() -> None:
            try:
                body = {**STREAM, "stream": False, "max_tokens": 400}
                answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S))
            except httpx.HTTPError as error:
                answers.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while not server.state()["running"]:
            time.sleep(0.01)
        os.kill(child.pid, number)
        began = time.monotonic()
        asking.join(30)
        assert time.monotonic() - began < 13
        (answer,) = answers
        assert isinstance(answer, httpx.Response)
        assert answer.status_code in (500, 503)
        assert "rank 1" in answer.json()["error"]["message"]
        assert server.process.wait(20) == 1
        psutil.wait_procs(children, timeout=10)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children)
