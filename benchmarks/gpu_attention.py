"""Decode attention over tiles, rows and contexts, and sampling: microseconds in a graph over cold memory.

    python benchmarks/gpu_attention.py --json FILE [--seconds S] [--rows 136 ..] [--groups 2] [--contexts sorted ..]

Tiles are named by the numbers of AttendTile. Compiling one tile takes seconds, so few rows and contexts
first. At the end: the best of each, against what tiles.py says.
Contexts: a number is one of all rows; "mixed" is uniform from 200 to 2,000, "sorted" the same with the longest first.
The floor is the KV read once at 4.57 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from attrs import astuple

from agentinfer.ops.kernels.attend_decode import attend_decode
from agentinfer.ops.kernels.sample import sample_tokens
from agentinfer.ops.kernels.tiles import AttendTile, attend_tile
from agentinfer.state.columns import PARAMS

BLOCK, DIM, HEADS = 16, 128, 8
TILES = (
    AttendTile(1, 64, 2, 2, registers=168),
    AttendTile(1, 64, 4, 2),
    AttendTile(1, 32, 2, 3, ahead=True),
    AttendTile(1, 64, 4, 3, ahead=True),
    AttendTile(1, 32, 1, 3, ahead=True),
    AttendTile(2, 64, 2, 2, 256, registers=168),
    AttendTile(4, 64, 2, 2, 256),
    AttendTile(8, 64, 2, 2, 256),
    AttendTile(16, 64, 2, 2, 128),
)
READ = 4.57e12


def replayed(run, count: int, sets: int = 3) -> float:
    """Microseconds of one of *count* launches by *run*."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(sets):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(3):
            graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 3 * 1e3 / count)
    return statistics.median(times)


def name(tile: AttendTile) -> str:
    return " ".join(str(int(x)) for x in astuple(tile))


def candidates(rows: int) -> list[AttendTile]:
    """Those that make a sensible number of programs."""
    return [t for t in TILES if t.splits <= 2 or 256 < rows * HEADS * t.splits <= 8192]


def attention(rows: int, context: str, group: int, tiles: list[AttendTile], pool: torch.Tensor) -> dict[str, float]:
    """Microseconds a tile."""
    rng = np.random.default_rng(0)
    lengths = np.full(rows, int(context)) if context.isdigit() else rng.integers(200, 2001, rows)
    if context == "sorted":
        lengths = np.sort(lengths)[::-1].copy()
    columns = -(-int(lengths.max()) // BLOCK)
    per_layer = rows * columns
    layers = max(1, min(8, pool.shape[1] // per_layer))
    dev = {"device": "cuda"}
    tables = [
        torch.cat((torch.zeros(1, columns, dtype=torch.int32, **dev),
                   (torch.randperm(per_layer, **dev).int() + i * per_layer).view(rows, columns)))
        for i in range(layers)
    ]  # fmt: skip
    qkv = torch.randn(rows, (group + 2) * HEADS * DIM, dtype=torch.bfloat16, **dev)
    norm = torch.ones(DIM, dtype=torch.bfloat16, **dev)
    angles = torch.rand(4096, DIM, **dev)
    ids = torch.arange(1, rows + 1, **dev)
    lens = torch.tensor(lengths, dtype=torch.int32, **dev)
    counters = torch.zeros(rows * HEADS, dtype=torch.int32, **dev)
    slots = [table[ids, (lens.long() - 1) // BLOCK].long() * BLOCK for table in tables]
    found = {}
    for tile in tiles:

        def run(tile: AttendTile = tile) -> None:
            for i in range(layers):
                attend_decode(
                    qkv, pool[0], pool[1], tables[i], ids, lens, slots[i], group * HEADS, angles, norm, norm, 1e-6,
                    0.088, None, counters, pdl=True, tile=tile,
                )  # fmt: skip

        found[name(tile)] = round(replayed(run, layers), 2)
    found["floor"] = round(2 * int(lengths.sum()) * HEADS * DIM * 2 / READ * 1e6, 2)
    return found


def sampling(rows: int, temperature: float, **filters: float) -> float:
    """Microseconds of one choice over Qwen3's vocabulary."""
    logits = torch.randn(rows, 151_936, device="cuda")
    params = np.zeros(rows, PARAMS)
    params["temperature"], params["seed"], params["top_p"] = temperature, np.arange(rows), 1
    for key, value in filters.items():
        params[key] = value
    words = torch.from_numpy(params.view(np.int32).reshape(rows, -1).copy()).cuda()
    index = torch.zeros(rows, dtype=torch.int32, device="cuda")
    out = torch.zeros((2, rows), dtype=torch.int64, device="cuda")
    return round(replayed(lambda: sample_tokens(logits, words, index, out[0], out[1]), 1), 2)


def main() -> None:
    """Measure until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--rows", type=int, nargs="+", default=[136, 256, 64, 192, 96, 40, 16])
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--contexts", nargs="+", default=["sorted", "1024", "600"])
    asked = parser.parse_args()
    begin, found = time.monotonic(), {}
    for rows, temperature in itertools.product((1, 64, 256), (0.0, 0.6)):
        found[f"sample {rows} at {temperature}"] = sampling(rows, temperature)
    for rows in (1, 256):
        found[f"sample {rows}, top-p"] = sampling(rows, 0.6, top_p=0.9)
        found[f"sample {rows}, top-k, top-p, min-p"] = sampling(rows, 0.6, top_k=50, top_p=0.9, min_p=0.05)
    print(found, flush=True)
    pool = torch.randn(2, 300_000, BLOCK, HEADS, DIM, device="cuda", dtype=torch.bfloat16)  # 20 GB
    for group, rows, context in itertools.product(asked.groups, asked.rows, asked.contexts):
        if time.monotonic() - begin > asked.seconds:
            break
        if rows * 4096 / BLOCK > 100_000 and context == "4096":
            continue
        now = attend_tile(rows, HEADS)
        got = attention(rows, context, group, list(dict.fromkeys([now, *candidates(rows)])), pool)
        found[f"attend {rows} x {context}, group {group}"] = got
        floor = got["floor"]
        best = min((v, k) for k, v in got.items() if k != "floor")
        print(f"{rows:4} x {context:>6} G{group} floor {floor:7.1f} now {got[name(now)]} best {best}", flush=True)
        print("    " + ", ".join(f"{k}: {v}" for k, v in got.items() if k != "floor"), flush=True)
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
