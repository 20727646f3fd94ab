"""A server under ten times the load that it can serve, and one with a thousand idle connections. Prints JSON.

    python benchmarks/overload.py [MODEL] [--seconds 60] [--times 10] [--idle 1000] [--rounds 3] [-- FLAGS OF SERVE]

The server is `agentinfer serve` in a process of its own, of a small drawn model unless MODEL is a folder; the clients
are two processes. What must hold is in "holds", with the numbers beside it; the exit status is 0 if all of it does.

* capacity: as many clients as sequences can run, each with a request at a time.
* storm: requests at --times that rate, for --seconds. After its first third, by when the pool's blocks have been
  written once, the server's memory grows by less than --memory-mb; who is accepted has a first token before three
  times the queue could have been served; the others get 503 and nothing else; afterwards every block is free or cached.
* idle: output tokens a second with --idle keep-alive connections and without, --rounds times in turn; the connections
  take less than 50 MB and 3 % of the tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from http_overhead import SHAPE

import toys
from agentinfer.bench.load import Load, measure, spread, summary
from agentinfer.sse import Remote
from serve_faults import served, settle
from tiny import write_tiny

ROWS, QUEUED = 8, 24
IDLE_MB, IDLE_SHARE = 50, 0.03
LOAD = Load(
    prompt_tokens=(16, 32), output_tokens=(32, 32), token_ids=(1, 250), concurrency=ROWS, processes=2, requests=8 * ROWS
)


class Memory:
    """Mutable: the resident megabytes of a server and its children, every half second."""

    def __init__(self, pid):
        self.process, self.seen, self.ending = psutil.Process(pid), [], threading.Event()

    def now(self):
        family = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_info().rss for one in family) / 1e6

    def watch(self):
        while not self.ending.wait(0.5):
            self.seen.append(self.now())

    @contextmanager
    def watched(self):
        self.seen.append(self.now())
        thread = threading.Thread(target=self.watch)
        thread.start()
        try:
            yield
        finally:
            self.ending.set()
            thread.join()


def storm(server, remote, name, capacity, args):
    load = evolve(
        LOAD, requests=round(args.times * capacity * args.seconds), rate=args.times * capacity, concurrency=100_000
    )
    memory = Memory(server.process.pid)
    with memory.watched():
        answers = measure(remote, name, load)
    settle(server)
    blocks = server.state()["blocks"]
    good = [one for one in answers if one.error is None]
    statuses = Counter(one.status for one in answers)
    bound_s = 3 * (ROWS + QUEUED) / capacity
    first, third = spread(one.first_s for one in good), memory.seen[len(memory.seen) // 3]
    return {
        "seconds": args.seconds,
        "requests_per_s": round(load.rate, 1),
        "sent": len(answers),
        "statuses": dict(sorted(statuses.items())),
        "served_per_s": round(len(good) / args.seconds, 1),
        "ttft_ms": first,
        "ttft_bound_ms": round(bound_s * 1e3),
        "refused_after_ms": spread(one.last_s for one in answers if one.status == 503),
        "memory_mb": {"before": memory.seen[0], "third": third, "most": max(memory.seen), "after": memory.now()},
        "blocks": blocks,
        "holds": {
            "memory is bounded": max(memory.seen) - third < args.memory_mb,
            "first tokens are bounded": bool(good) and first["max"] < bound_s * 1e3,
            "served whole": all(one.output_tokens == LOAD.output_tokens[1] for one in good),
            "the rest is 503": set(statuses) <= {200, 503},
            "it was an overload": statuses[503] > statuses[200],
            "every block is free": blocks["free"] + blocks["cached"] == blocks["total"],
        },
    }


def keep_alive(url, count):
    host, port = url.removeprefix("http://").split(":")
    lines = [socket.create_connection((host, int(port))) for _ in range(count)]
    for line in lines:
        line.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    for line in lines:
        assert b" 200 " in line.recv(1000)
    return lines


def idle(server, remote, name, capacity, args):
    load = evolve(LOAD, requests=max(ROWS, round(capacity * args.seconds / 4)))
    memory, held, speeds = Memory(server.process.pid), 0.0, {0: [], args.idle: []}
    for i in range(2 * args.rounds):
        before, lines = memory.now(), keep_alive(server.url, args.idle if i % 2 else 0)
        if lines:
            held = max(held, memory.now() - before)
        found = summary(load, measure(remote, name, load))
        assert found["failed"] == 0, found["errors"]
        speeds[len(lines)].append(round(found["output_tokens_per_s"], 1))
        for line in lines:
            line.close()
    without, with_ = (statistics.median(found) for found in speeds.values())
    return {
        "connections": args.idle,
        "memory_mb": held,
        "output_tokens_per_s": {"without": speeds[0], "with": speeds[args.idle]},
        "share_lost": 1 - with_ / without,
        "holds": {
            f"under {IDLE_MB} MB": held < IDLE_MB,
            f"under {IDLE_SHARE:.0%} of the tokens a second": 1 - with_ / without < IDLE_SHARE,
        },
    }


def rounded(x):
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return round(x, 3) if isinstance(x, float) else x


def run(model, args, more):
    flags = ["--max-num-seqs", ROWS, "--max-queued", QUEUED, "--num-blocks", 400, "--idle-timeout", 36_000]
    with served(model, [*map(str, flags), *more]) as server:
        remote, name = Remote(server.url), model
        answers = measure(remote, name, evolve(LOAD, warmup=ROWS))
        calm = summary(LOAD, answers)
        assert calm["failed"] == 0, calm["errors"]
        capacity = calm["requests_per_s"]
        found = {"load_average": os.getloadavg()[0], "cores": os.cpu_count(), "flags": more,
                 "requests_per_s": capacity, "ttft_ms": calm["ttft_ms"]}  # fmt: skip
        if args.seconds:
            found["storm"] = storm(server, remote, name, capacity, args)
        if args.idle:
            found["idle"] = idle(server, remote, name, capacity, args)
    return rounded(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mb", type=float, default=30.0)
    args, more = parser.parse_known_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file a connection, here and in the server
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            words = tuple(f" {i}x".encode() for i in range(SHAPE["vocab_size"] - 270))
            toys.folder_of(Path(folder), toys.byte_level(words), toys.CHATML)
            write_tiny(Path(folder), **SHAPE)
        began = time.monotonic()
        found = run(args.model or folder, args, [one for one in more if one != "--"])
        found["took_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(found, indent=2))
    return (
        0
        if all(all(part["holds"].values()) for part in found.values() if isinstance(part, dict) and "holds" in part)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
