"""Attention of prefill on a GPU: our tiles, candidate by candidate, against vLLM's FlashAttention-3, in TFLOP/s.

python benchmarks/gpu_prefill.py [--json FILE] [--seconds 240] [--heads 8B 0.6B SmolLM2]

Each candidate is checked against the first one before it is timed. Kernels run warm, one after another, 20 times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import astuple, frozen
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import Inputs, by_hand, host_rows, tables_of
from agentinfer.ops.kernels.attend_prefill import Tile, attend_tiles, chunk_tile, single_tile
from agentinfer.ops.kernels.qk_rope_write import qk_rope_write
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.ragged import tiles_of
from agentinfer.ops.rope import RopeSpec, cos_sin
from agentinfer.ops.vllm_ops import attend_fa3, attend_fa3_packed, fresh, load_attention

CUDA = torch.device("cuda")
HEADS = {"8B": HeadShape(32, 8, 128), "0.6B": HeadShape(16, 8, 128), "SmolLM2": HeadShape(9, 3, 64)}
STEPS = {  # count, context of each row
    "8192": ([8192], [8192]),
    "2048 after 6144": ([2048], [8192]),
    "4 x 1024": ([1024] * 4, [1024] * 4),
    "128": ([128], [128]),
    "512": ([512], [512]),
    "2048 + 255 decode at 1024": ([2048, *[1] * 255], [2048, *[1024] * 255]),
}
CHUNKS = (
    Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 5), Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 3), Tile(64, 64, 4, 5), Tile(64, 128, 4, 3), Tile(128, 32, 4, 3), Tile(256, 64, 8, 3),
)  # fmt: skip
SINGLES = (Tile(16, 64, 2, 2), Tile(16, 64, 2, 3), Tile(16, 32, 2, 3), Tile(16, 128, 4, 3), Tile(16, 64, 4, 3))


@frozen(eq=False)
class Case:
    x: Inputs
    layer: LayerKv
    q: Tensor
    flops: float


def make(shape: HeadShape, count: list[int], context: list[int], block_size: int) -> Case:
    need = [-(-c // block_size) for c in context]
    layout = kvs.gqa(block_size, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
    kv = kvs.allocate([layout], sum(need), len(need), max(need), CUDA)
    for plane in (kv.layers[0].k, values_of(kv.layers[0])):
        plane.normal_()
    ids = (torch.randperm(sum(need)) + 1).tolist()
    blocks = [[ids.pop() for _ in range(n)] for n in need]
    start = [c - n for c, n in zip(context, count, strict=True)]
    x, kv = by_hand(kv, [[1] * n for n in count], start, blocks)
    q = torch.randn(sum(count), shape.num_heads, shape.head_dim, device=CUDA, dtype=torch.bfloat16)
    pairs = sum(n * c - n * (n - 1) / 2 for n, c in zip(count, context, strict=True))
    return Case(x, kv.layers[0], q, 4 * pairs * shape.num_heads * shape.head_dim)


def timed(call: Callable[[], Any], reps: int = 20) -> float:
    """Microseconds: the median of 3 sets."""
    call()
    found = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(reps):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * begin.elapsed_time(end) / reps)
    return sorted(found)[1]


def ours(c: Case, chunk: Tile, single: Tile) -> Callable[[], Tensor]:
    host, group = host_rows(c.x), c.q.shape[1] // c.layer.layout.num_kv_heads
    few = single.rows // group
    lists = []
    for many, tile in ((True, chunk), (False, single)):
        rows = [i for i, n in enumerate(host.count) if (n > few) is many]
        if rows:
            lists.append((torch.from_numpy(tiles_of(host, rows, tile.rows // group)).to(CUDA), tile))
    out = torch.empty_like(c.q)

    def call() -> Tensor:
        for tiles, tile in lists:
            attend_tiles(c.q, c.layer.k, values_of(c.layer), c.x.table, tiles, out, 0.09, None, tile)
        return out

    return call


def fa3(c: Case) -> Callable[[], Tensor]:
    load_attention()
    table = tables_of(c.x, c.layer.layout.block_size)
    return lambda: attend_fa3(
        c.q, c.layer.k, values_of(c.layer), table, c.x.cu_seqlens_q, c.x.context, c.x.max_query, c.x.max_context,
        0.09, None,
    )  # fmt: skip


def fa3_packed(c: Case) -> Callable[[], Tensor]:
    """The same keys, one row after the other; values with the stride that they have in a qkv product."""
    load_attention()
    rows = tables_of(c.x, c.layer.layout.block_size).long()
    planes = [plane[rows].flatten(1, 2) for plane in (c.layer.k, values_of(c.layer))]
    k, v = (torch.cat([p[i, :n] for i, n in enumerate(host_rows(c.x).count)]) for p in planes)
    wide = torch.empty(len(v), c.q.shape[1] + 2 * v.shape[1], v.shape[2], dtype=v.dtype, device=CUDA)
    wide[:, -v.shape[1] :] = v
    v = wide[:, -v.shape[1] :]
    return lambda: attend_fa3_packed(c.q, k, v, c.x.cu_seqlens_q, c.x.max_query, 0.09, None)


def rope_case(shape: HeadShape, count: int) -> Callable[[], Tensor]:
    c = make(shape, [count], [count], 16)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(count, width, device=CUDA, dtype=torch.bfloat16)
    table = cos_sin(RopeSpec(1e6, shape.head_dim), count, CUDA)
    weight = torch.ones(shape.head_dim, device=CUDA, dtype=torch.bfloat16)
    return lambda: qk_rope_write(
        qkv, c.layer.k, values_of(c.layer), c.x.positions, c.x.slots, shape.num_heads, table, weight, weight, 1e-6
    )  # fmt: skip


def candidates(c: Case, shape: HeadShape) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    many = sum(n for n in host_rows(c.x).count if n > 1) * shape.num_heads
    first = chunk_tile(torch.bfloat16, shape.head_dim, many), single_tile(torch.bfloat16)
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {"ours": lambda: ours(c, *first), "FA3": lambda: fa3(c)}
    if fresh(c.x):
        found["FA3 packed"] = lambda: fa3_packed(c)
    for tile in CHUNKS:
        found[f"chunk {astuple(tile)}"] = lambda tile=tile: ours(c, tile, first[1])
    if 1 in host_rows(c.x).count:
        for tile in SINGLES:
            found[f"single {astuple(tile)}"] = lambda tile=tile: ours(c, first[0], tile)
    return found


def run(seconds: float, heads: list[str]) -> list[dict[str, Any]]:
    end, rows = time.monotonic() + seconds, []

    def report(**row: Any) -> None:
        rows.append(row)
        print(" | ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)

    for name in heads:
        shape = HEADS[name]
        report(heads=name, step="8192", what="qk_rope_write", us=timed(rope_case(shape, 8192)))
        for step, lengths in STEPS.items():
            c = make(shape, *lengths, 16)
            want = None
            for what, prepare in candidates(c, shape).items():
                if time.monotonic() > end:
                    report(heads=name, step=step, what="out of time")
                    return rows
                try:
                    call = prepare()
                    got = call()
                    off = 0.0 if want is None else float((got - want).abs().max())
                    want = got.clone() if want is None else want
                    us = timed(call)
                except Exception as error:  # noqa: BLE001 - a candidate that does not fit is a result
                    report(heads=name, step=step, what=what, error=f"{type(error).__name__}: {error}"[:200])
                    continue
                report(heads=name, step=step, what=what, us=us, tflops=c.flops / us / 1e6, largest_difference=off)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    args = parser.parse_args()
    rows = run(args.seconds, args.heads)
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
