"""The HTTP side in a process of its own: the same answers, and nobody survives anybody."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import psutil
import pytest

from agentinfer.loop import open_engine
from agentinfer.server.apart import Job, Wire
from agentinfer.server.front import Facts
from agentinfer.server.guard import Keys
from agentinfer.server.mail import Drop
from agentinfer.server.run import EngineDead, bind, serve
from agentinfer.server.site import Quotas
from agentinfer.state.policy import throughput
from serving import Server, options, running, slowed, small

COMPLETIONS = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 9, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["hello", [5, 6]], "max_tokens": 5, "n": 2, "seed": 1, "logprobs": 2, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"choice": ["yes"]}}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
    ("/tokenize", {"prompt": "hello"}),
]


def child_of(_: Server) -> psutil.Process:
    """The process that answers."""
    (child,) = [one for one in psutil.Process().children() if "agentinfer.server.apart" in " ".join(one.cmdline())]
    return child


def told(server: Server) -> list[Any]:
    """All answers, without what differs from one time to the next."""
    found: list[Any] = []
    for path, body in ASKED:
        answer = server.post(path, body)
        said = {key: value for key, value in answer.json().items() if key not in ("id", "created", "usage")}
        found.append((answer.status_code, said))
    return found


def test_a_job_crosses() -> None:
    """Facts, limits and the digests of keys come out of their bytes as they went in."""
    job = Job("folder", Facts(1, 2, 3, 4), options(keys=Keys(("a", "b"), ("c",)), quotas=Quotas(max_n=3), trace="t"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job) == job


def test_answers_are_the_same(folder: Path) -> None:
    """What clients see does not depend on where HTTP is answered."""
    with running(open_engine(folder, small())) as server:
        want = told(server)
    with running(open_engine(folder, small()), options(apart=True)) as server:
        assert told(server) == want
        assert server.chunks(COMPLETIONS, prompt="hello", max_tokens=4)[-1]["choices"][0]["finish_reason"]
        server.quiet()
    assert server.outcome == []


def test_keys_hold_there(folder: Path) -> None:
    """Keys and the administrator's paths work as ever."""
    chosen = options(apart=True, keys=Keys(("secret",), ("root",)))
    with running(open_engine(folder, small()), chosen) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        state = server.get("/admin/state", headers={"Authorization": "Bearer root"}).json()
        assert state["blocks"]["free"] == 64


def test_the_end_waits_for_those_who_have_begun(folder: Path) -> None:
    """Told to end, it finishes what has begun; both processes are gone then."""
    engine = slowed(open_engine(folder, small()), 0.01)
    with running(engine, options(apart=True)) as server, ThreadPoolExecutor(1) as pool:
        child = child_of(server)
        job = pool.submit(server.chunks, COMPLETIONS, prompt=[5], max_tokens=60, ignore_eos=True)
        while not engine.world.state.step:
            time.sleep(0.01)
        server.end()
        assert job.result()[-1]["choices"][0]["finish_reason"] == "length"
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert server.outcome == []
        assert not child.is_running()


def test_a_child_that_dies_ends_the_server(folder: Path) -> None:
    """When the process that answers is killed, serve raises."""
    with running(open_engine(folder, small()), options(apart=True)) as server:
        child_of(server).kill()
        server.thread.join(15)
        assert [type(error) for error in server.outcome] == [EngineDead]
        assert "-9" in str(server.outcome[0])


def test_a_dead_engine_ends_both(folder: Path) -> None:
    """When the engine can not go on, clients are told by the other process, which then ends."""

    def policy(state: Any) -> Any:
        if state.step > 5:
            raise ZeroDivisionError("planted")
        return throughput(state)

    with running(open_engine(folder, small(), policy), options(apart=True)) as server:
        child = child_of(server)
        assert "planted" in server.post(COMPLETIONS, ENDLESS).json()["error"]["message"]
        assert server.get("/health").status_code == 503
        server.thread.join(15)
        assert [type(error) for error in server.outcome] == [EngineDead]
        assert not child.is_running()


def test_told_to_end_before_it_answers(folder: Path) -> None:
    """A signal that comes while the other process starts is no failure: status 0, nothing said, nobody left."""
    command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", "0", "--num-blocks", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        while not parent.children():
            time.sleep(0.01)
        (child,) = parent.children()
        process.terminate()
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 0
    assert not child.is_running()


def test_who_can_not_hear_the_child_any_more_ends(folder: Path) -> None:
    """What is raised where its commands are heard, such as by a standard output that is closed, ends both."""

    def ready(_end: Any) -> None:
        raise BrokenPipeError("planted")

    with bind("127.0.0.1", 0) as listener, pytest.raises(BrokenPipeError, match="planted"):
        serve(open_engine(folder, small()), listener, options(apart=True), ready=ready)
    assert not [one for one in psutil.Process().children() if "agentinfer.server.apart" in one.cmdline()]


def test_a_child_that_dies_while_it_writes() -> None:
    """What it said before is heard, and a frame that is cut off is not."""
    ours, theirs = socket.socketpair()
    with ours:
        body = msgspec.msgpack.encode(Drop(7, "gone"))
        theirs.sendall(struct.pack("!I", len(body)) + body + struct.pack("!I", 100) + b"half")
        theirs.close()
        assert list(Wire(ours).commands()) == [Drop(7, "gone")]


def test_a_child_that_dies_with_mail_unread() -> None:
    """Its connection is reset; that is an end as any other."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"unread")
        theirs.close()
        assert list(Wire(ours).commands()) == []


def test_nobody_is_left_alone(folder: Path) -> None:
    """When the engine's process is killed, the one that answers ends by itself."""
    command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", "0", "--num-blocks", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        (child,) = psutil.Process(process.pid).children()
        assert httpx.get(f"{url}/health").status_code == 200
        os.kill(process.pid, signal.SIGKILL)
        child.wait(20)
    assert not child.is_running()
