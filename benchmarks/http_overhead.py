"""Output tokens a second over HTTP against the offline loop, in the same process, taking turns.

64 streams on a CPU by default, of a model whose step takes 20 ms or more. The clients are a process of their own.
`python benchmarks/http_overhead.py --rounds 3`; with --idle N, so many idle keep-alive connections are held open in
every second round over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import serving
import toys
from agentinfer.bench.load import Load, measure, plan, summary
from agentinfer.build import Settings
from agentinfer.loop import generate, open_engine
from agentinfer.sse import Remote
from agentinfer.state.request import SamplingParams
from tiny import write_tiny

SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "eos_token_id": 8191,
}


def offline(engine, load):
    jobs = plan(load)
    params = [SamplingParams(max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True) for job in jobs]
    began, first = time.perf_counter(), engine.world.state.step
    results = generate(engine, [job.prompt for job in jobs], params, progress=False)
    took = time.perf_counter() - began
    tokens = sum(len(one.output_ids) for one in results)
    return tokens / took, took / (engine.world.state.step - first) * 1e3


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def idle_connections(server, count):
    lines = []
    for _ in range(count):
        line = socket.create_connection(("127.0.0.1", server.port))
        line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        lines.append(line)
    for line in lines:
        line.recv(1000)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--http-process", action="store_true")
    args = parser.parse_args()
    load = Load(
        requests=args.streams,
        prompt_tokens=(16, 32),
        output_tokens=(args.tokens, args.tokens),
        token_ids=(1, 250),
        concurrency=args.streams,
        processes=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        words = tuple(f" {i}x".encode() for i in range(SHAPE["vocab_size"]))  # or most tokens would have no text
        toys.folder_of(Path(folder), toys.byte_level(words[: SHAPE["vocab_size"] - 270]), toys.CHATML)
        write_tiny(Path(folder), **SHAPE)
        settings = Settings(num_blocks=2048, max_num_seqs=args.streams, seed=0, prefix_cache=False)
        engine = open_engine(folder, settings)
        offline(engine, load)
        rows = []
        with serving.running(engine, serving.options(max_queued=2 * args.streams, apart=args.http_process)) as server:
            for i in range(args.rounds):
                alone, step_ms = offline(engine, load)  # nothing else runs: the driver waits for a command
                before, lines = resident(), idle_connections(server, args.idle if i % 2 else 0)
                held = resident() - before
                found = summary(load, measure(Remote(server.url), serving.NAME, load))
                for line in lines:
                    line.close()
                rows.append(
                    {"offline_tok_s": round(alone, 1), "step_ms": round(step_ms, 2),
                     "http_tok_s": round(found["output_tokens_per_s"], 1), "idle": len(lines),
                     "idle_mb": round(held, 1), "itl_p99_ms": round(found["itl_ms"]["p99"], 1)}
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        ratio = statistics.median(row["http_tok_s"] / row["offline_tok_s"] for row in rows)
        print(json.dumps({"ratio": round(ratio, 3), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
