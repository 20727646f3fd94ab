"""The status page: what is sent. What a browser makes of it: tests/clients."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from agentinfer.loop import open_engine
from agentinfer.server.guard import Keys
from serving import Server, options, running, slowed, small


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One whose steps take 10 ms."""
    with running(slowed(open_engine(folder, small()), 0.01)) as one:
        yield one
        one.quiet()


def test_the_page_runs_nothing_but_its_own(server: Server) -> None:
    """It comes with a policy that names its own script and style by their hashes."""
    answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "innerHTML" not in answer.text


def test_it_can_be_left_out(folder: Path) -> None:
    """With --no-ui there is no page; with keys it is closed as everything else."""
    with running(open_engine(folder, small()), options(ui=False)) as server:
        assert server.get("/").status_code == 404
    with running(open_engine(folder, small()), options(keys=Keys(("secret",), ()))) as server:
        answer = server.get("/")
        assert answer.status_code == 401
        assert "Basic" in answer.headers["www-authenticate"]
        assert server.get("/", auth=("", "secret")).status_code == 200
