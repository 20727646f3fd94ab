"""Locust, the load generator: `examples/locust_load.py` against a server. Run by name: `pytest tests/clients`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import sources
from agentinfer.loop import open_engine
from serving import Server, command, options, running, slowed, small, write_talker

LOCUST = command("locust")
pytestmark = pytest.mark.skipif(LOCUST is None, reason="locust is not installed: pip install 'agentinfer[clients]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """One whose steps take 10 ms, and in which four sequences run and six wait."""
    folder = write_talker(tmp_path_factory.mktemp("talker"))
    with running(slowed(open_engine(folder, small(max_num_seqs=4)), 0.01), options(max_queued=6)) as one:
        yield one
        one.quiet()


def load(server: Server, clients: int, cwd: Path) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Locust's status, its statistics by method and path, and what it says, after five seconds of load."""
    assert LOCUST is not None
    given = [LOCUST, "-f", str(sources.ROOT / "examples" / "locust_load.py"), "--headless", "--host", server.url]
    given += ["-u", str(clients), "-r", "50", "-t", "5s", "--stop-timeout", "10", "--json"]
    done = subprocess.run(
        given, env={**os.environ, "MAX_TOKENS": "8"}, capture_output=True, text=True, check=False, cwd=cwd, timeout=90
    )
    stats = json.loads(done.stdout)
    return done.returncode, {f"{one['method']} {one['name']}": one for one in stats}, done.stderr


def test_load_is_served(server: Server, tmp_path: Path) -> None:
    """Clients that fit get all of their answers, each with a first token before its end."""
    status, stats, said = load(server, 4, tmp_path)
    assert status == 0, said
    for path in ("/v1/completions", "/v1/chat/completions"):
        whole, first = stats[f"POST {path}"], stats[f"TTFT {path}"]
        assert whole["num_failures"] == first["num_failures"] == 0
        assert whole["num_requests"] == first["num_requests"] > 0
        assert first["total_response_time"] < whole["total_response_time"]


def test_overload_is_503(server: Server, tmp_path: Path) -> None:
    """Of more clients than may wait some are told to come back, and all others are served; nothing else goes wrong."""
    status, stats, said = load(server, 40, tmp_path)
    assert status == 1, said
    posts = [one for name, one in stats.items() if name.startswith("POST")]
    failed = sum(one["num_failures"] for one in posts)
    assert 0 < failed < sum(one["num_requests"] for one in posts)
    assert said.count("503: ") >= 1
    assert "ended before" not in said
    server.quiet()
    assert server.get("/health").status_code == 200
