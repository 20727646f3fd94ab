"""What clients, networks and steps do to a server, at random, over real processes: `python tests/serve_faults.py`.

It starts `agentinfer serve` on this machine, with the arguments after `--` (such as --tp 2), and asks it badly: clients
that leave at random, bodies that are no requests, a body of 20 MB, heads and bodies that never end, steps that raise,
SIGTERM with 20 streams. At the end no block is held, no request has hung, and the exit status is right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
from attrs import define, frozen

HANG_S = 120.0
"""No request may take longer, whatever happens to others."""
ROOT = {"Authorization": "Bearer root"}
STREAM = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}

# What the child runs: the command, whose steps raise with a probability of 1 in 20 while the file is there.
CHILD = """
import os, random, sys
import agentinfer.steps as steps
inner = steps._eager
def eager(*given, **more):
    if os.path.exists(sys.argv[1]) and random.random() < 0.05:
        raise RuntimeError("a planted fault")
    return inner(*given, **more)
steps._eager = eager
from agentinfer.cli import main
sys.exit(main(sys.argv[2:]))
"""


@frozen(eq=False)
class Server:
    """One in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    flag: Path

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/admin/state", headers=ROOT, timeout=HANG_S).json()


@define
class Tally:
    """Mutable: what became of the requests."""

    done: int = 0
    refused: int = 0
    failed: int = 0
    left: int = 0
    hung: int = 0


@contextlib.contextmanager
def served(model: str, more: list[str]) -> Generator[Server]:
    """A server of *model*; killed if it is still there at the end."""
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder) / "raise"
        command = [sys.executable, "-c", CHILD, str(flag), "serve", model, "--port", "0", "--admin-key", "root"]
        command += ["--header-timeout", "2", "--body-timeout", "2", "--num-blocks", "256", *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line.startswith("serving "), "the server did not start"
                yield Server(process, line.split()[-1], flag)
            finally:
                if process.poll() is None:
                    process.kill()


async def leave_at_random(server: Server, rng: random.Random, count: int, tally: Tally) -> None:
    """*count* clients, 20 at a time, of which most leave before their answer has ended."""
    slots = asyncio.Semaphore(20)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as client:

        async def one() -> None:
            async with slots:
                body = {
                    "prompt": [rng.randrange(200) for _ in range(rng.randrange(1, 60))],
                    "max_tokens": rng.randrange(1, 60),
                    "n": rng.choice([1, 1, 1, 2]),
                    "stream": rng.random() < 0.7,
                }
                patience = rng.choice([0.005, 0.02, 0.1, 0.3, HANG_S])
                try:
                    async with asyncio.timeout(patience):
                        answer = await client.post("/v1/completions", json=body)
                except TimeoutError:
                    tally.left += patience < HANG_S
                    tally.hung += patience >= HANG_S
                else:
                    tally.done += answer.status_code == 200
                    tally.refused += answer.status_code == 503
                    tally.failed += answer.status_code == 500
                    assert answer.status_code in (200, 500, 503), answer.text

        await asyncio.gather(*(one() for _ in range(count)))


def malformed(rng: random.Random, count: int) -> list[bytes]:
    """Bodies that are no requests: cut off, spliced, of other types, far too deep."""
    good = json.dumps({"prompt": "hello", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "n": 1}).encode()
    odd = [b"", b"null", b"[]", b"{", b'"x"', b"[" * 50_000, b'{"prompt":' * 5_000, b"\xff" * 100, b'{"prompt": 1e999}']
    values = ["null", "-1", "1e400", '"x"', "[]", "{}", "true", "[[]]", '"\\ud800"', "99999999999999999999", "0.5"]
    names = ["prompt", "max_tokens", "temperature", "stop", "n", "seed", "logit_bias", "stream", "logprobs", "top_k"]
    made = list(odd)
    while len(made) < count:
        if rng.random() < 0.4:
            data = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            made.append(bytes(data[: rng.randrange(1, len(data) + 1)]))
        else:
            fields = {name: rng.choice(values) for name in rng.sample(names, 4)}
            made.append(("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode())
    return made


def send_malformed(server: Server, rng: random.Random, count: int) -> None:
    """None of them is an internal error, and none hangs."""
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        for body in malformed(rng, count):
            path = rng.choice(["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), (path, body[:200], answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        large = client.post("/v1/completions", content=b" " * 20_000_000, headers={"content-type": "application/json"})
        assert large.status_code == 413, large.text


def slow_loris(server: Server, count: int) -> None:
    """Heads and bodies that come a byte at a time are given up."""
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    lines = [socket.create_connection((host, int(port))) for _ in range(count)]
    until = time.monotonic() + 20
    sent = [0] * count
    open_ = set(range(count))
    while open_ and time.monotonic() < until:
        for i in tuple(open_):
            data = head + b"{" + b" " * 400 if i % 2 else head
            try:
                lines[i].settimeout(0)
                lines[i].send(data[sent[i] : sent[i] + (len(head) if i % 2 and not sent[i] else 1)])
                sent[i] += len(head) if i % 2 and not sent[i] else 1
                with contextlib.suppress(BlockingIOError):
                    if lines[i].recv(1000) == b"" or i % 2:
                        open_.discard(i)
            except OSError:
                open_.discard(i)
        assert httpx.get(f"{server.url}/health", timeout=HANG_S).status_code == 200
        time.sleep(0.1)
    for line in lines:
        line.close()
    assert not open_, f"{len(open_)} connections are still open"


def settle(server: Server) -> None:
    """All requests have ended, and no block is held."""
    until = time.monotonic() + 30
    while (state := server.state())["running"] or state["waiting"] or state["requests"]:
        assert time.monotonic() < until, state
        time.sleep(0.1)
    assert state["blocks"]["referenced"] == 0, state
    assert state["blocks"]["free"] + state["blocks"]["cached"] == state["blocks"]["total"], state


async def terminate(server: Server, streams: int) -> int:
    """SIGTERM while *streams* are read: each ends as it should, or with an error event. How many hung."""
    hung = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:

        async def one(i: int) -> None:
            nonlocal hung
            try:
                async with asyncio.timeout(HANG_S), client.stream("POST", "/v1/completions", json=STREAM) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
                assert answer.status_code == 503 or lines[-1] == "data: [DONE]", lines[-2:]
            except TimeoutError:
                hung += 1

        asking = [asyncio.create_task(one(i)) for i in range(streams)]
        await asyncio.sleep(1.0)
        os.kill(server.process.pid, signal.SIGTERM)
        await asyncio.gather(*asking)
    return hung


def rounds(model: str, more: list[str], seed: int, clients: int, bodies: int, *, alone: bool) -> dict[str, Any]:
    """All of it; *alone*: one rank, which survives steps that raise. What happened, in numbers."""
    rng, tally = random.Random(seed), Tally()
    with served(model, more) as server:
        asyncio.run(leave_at_random(server, rng, clients, tally))
        settle(server)
        send_malformed(server, rng, bodies)
        slow_loris(server, 8)
        settle(server)
        if alone:
            server.flag.touch()
            asyncio.run(leave_at_random(server, rng, clients // 2, tally))
            server.flag.unlink()
            settle(server)
            assert httpx.get(f"{server.url}/health", timeout=HANG_S).status_code == 200
        tally.hung += asyncio.run(terminate(server, 20))
        status = server.process.wait(60)
        assert status == 0, status
    found = {"seed": seed, "done": tally.done, "left": tally.left, "refused": tally.refused, "failed": tally.failed}
    found |= {"hung": tally.hung, "exit": status}
    if not alone:
        found["exit_after_a_lost_rank"] = lost_rank(model, more)
    assert tally.hung == 0, found
    return found


def lost_rank(model: str, more: list[str]) -> int:
    """A step that raises on one of several ranks ends them all: every client is told, and the status is not 0."""
    with served(model, more) as server:
        server.flag.touch()
        said: list[str] = []
        with contextlib.suppress(httpx.HTTPError):  # it may be gone before the last answer
            for seed in range(50):
                body = {**STREAM, "stream": False, "seed": seed}
                said.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S).text)
        status = server.process.wait(60)
        assert status != 0
        assert not said or "planted" in said[-1] or "choices" in said[-1] or "failed" in said[-1], said[-1:]
        return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--bodies", type=int, default=50)
    args, more = parser.parse_known_args()
    more = [one for one in more if one != "--"]
    print(json.dumps(rounds(args.model, more, args.seed, args.clients, args.bodies, alone="--tp" not in more)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
