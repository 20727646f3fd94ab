"""Ten times as many requests as can be served: memory and waiting are bounded, the rest is told to come back."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from agentinfer.bench.load import Load, plan, run
from agentinfer.loop import open_engine
from agentinfer.sse import Remote
from serving import NAME, options, running, slowed, small, write_talker

SECONDS = 15.0


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_overload(tmp_path: Path) -> None:
    """Who is accepted waits for a bounded time, the others get 503 at once; afterwards every block is free."""
    engine = slowed(open_engine(write_talker(tmp_path), small(max_num_seqs=4)), 0.01)
    with running(engine, options(max_queued=12)) as server:
        remote, sizes = Remote(server.url), {"prompt_tokens": (4, 20), "output_tokens": (20, 20), "token_ids": (1, 200)}
        calm = Load(requests=24, concurrency=8, **sizes)
        began = time.monotonic()
        answers = asyncio.run(run(remote, NAME, calm, plan(calm), 8, time.time()))
        assert all(one.error is None for one in answers)
        capacity = 24 / (time.monotonic() - began)
        before = resident()
        storm = Load(requests=round(10 * capacity * SECONDS), rate=10 * capacity, concurrency=10_000, **sizes)
        answers = asyncio.run(run(remote, NAME, storm, plan(storm), 10_000, time.time()))
        served = [one for one in answers if one.error is None]
        assert {one.status for one in answers} == {200, 503}
        assert len(served) > capacity * SECONDS / 3
        assert all(one.output_tokens == 20 for one in served)
        waited = sorted(one.first_s for one in served)
        assert waited[-1] < 10 * 16 / capacity, waited[-5:]
        assert resident() - before < 60e6
        server.quiet()


@pytest.mark.slow
def test_idle_connections_are_cheap(tmp_path: Path) -> None:
    """A thousand connections that are kept alive take less than 50 MB."""
    with running(open_engine(write_talker(tmp_path), small())) as server:
        before, lines = resident(), list[socket.socket]()
        for _ in range(1000):
            line = socket.create_connection(("127.0.0.1", server.port))
            line.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            lines.append(line)
        for line in lines:
            assert b" 200 " in line.recv(1000)
        assert resident() - before < 50e6
        assert server.complete(prompt=[5], max_tokens=3)
        for line in lines:
            line.close()
