"""Our decode kernels on a GPU, tile by tile, in a captured graph with cold weights, against the time their bytes take.

python benchmarks/gpu_kernels.py [--json FILE] [--seconds 140] [--models Qwen3-8B Qwen3-0.6B]
    [--only gemv gemm attend small] [--rows 2 8 16 32 64 96] [--defaults]

Each kernel is first timed with the tile that tiles.py gives (and cuBLAS beside it), then with candidates in turn, as
long as there is time; a candidate that computes something else says so. At the end, the best of each against the
default. --defaults: no candidates. Copies of the weights or the KV make more than four times the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import astuple, frozen
from gpu_time import captured
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.kernels.add_norm import add_norm
from agentinfer.ops.kernels.attend_decode import COUNTERS, attend_decode
from agentinfer.ops.kernels.embed import embed
from agentinfer.ops.kernels.gemm import gemm
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.sample import sample_tokens
from agentinfer.ops.kernels.silu import silu_and_mul
from agentinfer.ops.kernels.tiles import AttendTile, GemmTile, GemvTile, attend_tile, gemm_tile, gemv_tile

CUDA = torch.device("cuda")
BANDWIDTH = 4.57e6
"""Bytes a microsecond that a kernel reads at best on an H200."""
COLD = 220 << 20
MODELS = {  # hidden, query heads, KV heads, head dim, feed forward, vocabulary
    "Qwen3-8B": (4096, 32, 8, 128, 12288, 151936),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 151936),
    "SmolLM2": (576, 9, 3, 64, 1536, 49152),
}
ATTEND = (
    (1, 256),
    (1, 1024),
    (1, 8192),
    (4, 1024),
    (16, 256),
    (16, 1024),
    (64, 256),
    (64, 1024),
    (256, 256),
    (256, 1024),
)
GROUPS = ("gemv", "gemm", "attend", "small")


@frozen(eq=False)
class Work:
    """One kernel at one shape."""

    what: dict[str, Any]
    bytes: float
    copies: int
    call: Callable[[int, Any], Tensor]
    """(copy, tile) -> result."""
    tile: Any
    candidates: tuple[Any, ...]
    beside: Callable[[int], Tensor] | None = None
    """(copy) -> the same by cuBLAS."""
    sum_parts: bool = False


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def copies_of(size: float) -> int:
    return int(min(48, max(1, -(-COLD // size))))


def products(model: str) -> dict[str, tuple[int, int, bool]]:
    d, n, h, dim, f, v = MODELS[model]
    return {
        "qkv": ((n + 2 * h) * dim, d, False), "o": (d, n * dim, False), "gate_up": (f, d, True), "down": (d, f, False),
        "head": (v, d, False),
    }  # fmt: skip


def weights(n: int, k: int, *, gated: bool) -> list[Tensor]:
    rows = 2 * n if gated else n
    return [rand(rows, k, scale=k**-0.5) for _ in range(copies_of(rows * k * 2))]


def gemv_candidates(n: int, k: int, *, gated: bool) -> tuple[GemvTile, ...]:
    found = []
    for rows, chunk, warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
        each = rows * chunk * (2 if gated else 1) / (32 * warps)
        if chunk < 2 * k and 16 <= each <= 128 and n / rows >= 128 and (k < 4096 or (chunk >= 1024 and rows <= 8)):
            found.append(GemvTile(rows, chunk, warps))
    return tuple(found)


def gemv_work(model: str, part: str) -> Work:
    n, k, gated = products(model)[part]
    ws = weights(n, k, gated=gated)
    normed, wide = part not in {"o", "down"}, torch.float32
    x = rand(1, k, dtype=wide if normed else torch.bfloat16)
    scale = rand(k) if normed else None
    residual = rand(1, n, dtype=wide)

    def call(i: int, tile: GemvTile) -> Tensor:
        return gemv(
            x, ws[i], wide if part == "head" else torch.bfloat16, norm_K=scale, eps=1e-6, gated=gated,
            add_to=None if normed else residual, pdl=True, tile=tile,
        )  # fmt: skip

    half = x.to(torch.bfloat16)
    return Work(
        {"kernel": "gemv", "model": model, "part": part, "rows": 1}, ws[0].nbytes, len(ws),
        call, gemv_tile(n, k, gated),
        gemv_candidates(n, k, gated=gated), lambda i: functional.linear(half, ws[i]),
    )  # fmt: skip


def gemm_candidates(rows: int, k: int, *, gated: bool, partial: bool) -> tuple[GemmTile, ...]:
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    found = []
    if rows > 64:  # few, as each takes seconds to compile
        sizes = ((128, 64, 64, 4, 4), (128, 64, 128, 3, 4), (128, 32, 128, 4, 4), (64, 64, 128, 4, 4),
                 (64, 32, 128, 4, 4), (128, 128, 64, 4, 8))  # fmt: skip
        return tuple(GemmTile(*size, split) for size in sizes for split in ((1, 4) if partial else (1,)))
    for tall, n, deep, stages, warps, split in itertools.product(
        sorted({m, 64}), (32, 64, 128), (128, 64, 256), (4, 6, 3), (4, 8), (1, 2, 4, 8) if partial else (1,)
    ):
        shared = 2 * stages * deep * (tall + n * (2 if gated else 1))
        if shared <= 220 << 10 and k >= 2 * deep * split and stages * deep <= k and not (warps == 8 and n < 128):
            found.append(GemmTile(tall, n, deep, stages, warps, split))
    return tuple(found)


def gemm_work(model: str, part: str, rows: int) -> Work:
    n, k, gated = products(model)[part]
    ws, x = weights(n, k, gated=gated), rand(rows, k)
    partial = part in {"o", "down"}
    dtype = torch.float32 if partial or part == "head" else torch.bfloat16

    def cublas(i: int) -> Tensor:
        if part == "head":
            return torch.mm(x, ws[i].t(), out_dtype=torch.float32)
        y = functional.linear(x, ws[i])
        return silu_and_mul(y) if gated else y

    return Work(
        {"kernel": "gemm", "model": model, "part": part, "rows": rows},
        ws[0].nbytes + x.nbytes + rows * n * dtype.itemsize, len(ws),
        lambda i, tile: gemm(x, ws[i], dtype, gated=gated, partial=partial, pdl=True, tile=tile),
        gemm_tile(rows, n, k, gated, partial=partial), gemm_candidates(rows, k, gated=gated, partial=partial), cublas,
        sum_parts=partial,
    )  # fmt: skip


def attend_work(model: str, rows: int, context: int) -> Work:
    _, n, h, dim, _, _ = MODELS[model]
    columns = -(-context // 16)
    size = 2 * rows * context * h * dim * 2
    copies = copies_of(size)
    caches = [rand(2, rows * columns + 1, 16, h, dim) for _ in range(copies)]
    table = (torch.randperm(rows * columns, device=CUDA) + 1).int().view(rows, columns)
    order = torch.arange(rows, device=CUDA)
    slots = table[:, -1].long() * 16 + (context - 1) % 16
    qkv, angles, scale = rand(rows, (n + 2 * h) * dim), rand(context, dim, dtype=torch.float32), rand(dim)
    lengths = torch.full((rows,), context, device=CUDA, dtype=torch.int32)
    counters = torch.zeros(COUNTERS, device=CUDA, dtype=torch.int32)

    def call(i: int, tile: AttendTile) -> Tensor:
        return attend_decode(
            qkv, *caches[i], table, order, lengths, slots, n, angles, scale, scale, 1e-6, dim**-0.5, None, counters,
            pdl=True, tile=tile,
        )  # fmt: skip

    pairs = rows * h
    tiles = []
    for splits, (keys, warps), stages in itertools.product(
        (1, 2, 4, 8, 16, 32, 64), ((64, 2), (32, 2), (32, 4), (64, 4), (128, 4)), (2, 3)
    ):
        if (splits == 1 or pairs * splits <= 1024) and pairs * splits >= 32 and context // splits >= keys // 2:
            tiles.append(AttendTile(splits, keys, warps, stages))
    return Work(
        {"kernel": "attend", "model": model, "part": f"context {context}", "rows": rows}, size, copies, call,
        attend_tile(rows, h), tuple(tiles),
    )  # fmt: skip


def small_works(model: str) -> Iterator[Work]:
    """What has no tiles to choose."""
    d, _, _, _, f, v = MODELS[model]
    for rows in (1, 64, 256):
        residual, parts, scale = rand(rows, d, dtype=torch.float32), rand(2, rows, d, dtype=torch.float32), rand(d)
        gate_up, table, ids = rand(rows, 2 * f), rand(v, d), torch.randint(0, v, (rows,), device=CUDA)
        logits = rand(rows, v, dtype=torch.float32)
        index, chosen = torch.zeros(rows, device=CUDA, dtype=torch.int32), torch.zeros(2, rows, device=CUDA).long()
        named: dict[str, tuple[float, Callable[[], Any]]] = {
            "add_norm of 2 parts": (
                rows * d * 18,
                lambda r=residual, p=parts, s=scale: add_norm(r, p, s, 1e-6, torch.bfloat16, pdl=True),
            ),
            "silu_and_mul": (rows * f * 6, lambda x=gate_up: silu_and_mul(x, pdl=True)),
            "embed": (rows * d * 6, lambda i=ids, t=table: embed(i, t, pdl=True)),
        }
        for name, temperature in (("greedy", 0.0), ("noise", 1.0)):
            params = torch.zeros(rows, 8, device=CUDA, dtype=torch.int32)
            params[:, 0] = torch.full((rows,), temperature).view(torch.int32)
            named[f"sample_tokens {name}"] = (
                rows * v * 4,
                lambda x=logits, p=params, i=index, c=chosen: sample_tokens(x, p, i, c[0], c[1], pdl=True),
            )
        for name, (size, call) in named.items():
            yield Work(
                {"kernel": "small", "model": model, "part": name, "rows": rows}, size, 1,
                lambda _, __, call=call: call(), None, (),
            )  # fmt: skip


def makers(models: list[str], only: list[str], rows: list[int]) -> Iterator[Callable[[], Iterator[Work]]]:
    """Works, each made when its turn comes: their weights do not fit together."""

    def one(make: Callable[..., Work], *args: Any) -> Callable[[], Iterator[Work]]:
        return lambda: iter([make(*args)])

    for model in models:
        if "small" in only:
            yield lambda model=model: small_works(model)
        if "gemv" in only:
            yield from (one(gemv_work, model, part) for part in products(model))
        if "gemm" in only:
            yield from (one(gemm_work, model, part, n) for part in products(model) for n in rows)
        if "attend" in only:
            yield from (one(attend_work, model, n, context) for n, context in ATTEND)


class Report:
    """The rows so far. Mutable."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.end = time.monotonic() + seconds

    def add(self, work: Work, how: str, us: float | None, **more: Any) -> None:
        floor = work.bytes / BANDWIDTH
        row = {**work.what, "how": how, "us": us, "floor_us": floor, "share": floor / us if us else None, **more}
        self.rows.append(row)
        print(" | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)


def result(work: Work, tile: Any) -> Tensor | None:
    """What the kernel computes, to compare tiles by."""
    if work.what["kernel"] == "small" or (work.what["kernel"] == "gemv" and work.what["part"] in {"o", "down"}):
        return None
    out = work.call(0, tile).float()
    return out.sum(0) if work.sum_parts else out


def first(work: Work, report: Report) -> Tensor | None:
    """The default, and cuBLAS."""
    want = result(work, work.tile)
    report.add(
        work,
        f"default {astuple(work.tile) if work.tile else ''}",
        captured(lambda i: work.call(i, work.tile), work.copies, launches=24),
    )
    if work.beside is not None:
        report.add(work, "cuBLAS", captured(work.beside, work.copies, launches=24))
    return want


def rest(work: Work, want: Tensor | None, report: Report, until: float) -> None:
    """The candidates, until it is time for the next work."""
    for tile in work.candidates:
        if time.monotonic() > until:
            break
        if tile == work.tile:
            continue
        try:
            got = result(work, tile)
            off = None if got is None or want is None else float((got - want).norm() / want.norm())
            us = captured(lambda i, tile=tile: work.call(i, tile), work.copies, launches=24)
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
            report.add(work, str(astuple(tile)), None, error=f"{type(error).__name__}: {error}"[:120])
            continue
        report.add(work, str(astuple(tile)), us, **({} if off is None or off < 1e-2 else {"wrong": off}))


def summary(rows: list[dict[str, Any]]) -> None:
    """The best tile of each work, where it is not the default."""
    key = ("kernel", "model", "part", "rows")
    for name, group in itertools.groupby(rows, lambda row: tuple(row[k] for k in key)):
        sound = [row for row in group if row["us"] and "wrong" not in row and row["how"] != "cuBLAS"]
        if sound:
            best = min(sound, key=lambda row: row["us"])
            print(
                *name, f"default {sound[0]['us']:.2f}, best {best['us']:.2f} us ({best['share']:.2f}) by {best['how']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--models", nargs="+", default=["Qwen3-8B", "Qwen3-0.6B"], choices=list(MODELS))
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--defaults", action="store_true")
    args = parser.parse_args()
    report = Report(args.seconds)
    turns = list(makers(args.models, args.only, args.rows))
    for i, make in enumerate(turns):
        share = (report.end - time.monotonic()) / (len(turns) - i)
        until = time.monotonic() + share
        for work in make():
            if time.monotonic() > report.end:
                break
            want = first(work, report)
            if not args.defaults:
                rest(work, want, report, until)
        torch.cuda.empty_cache()
    summary(report.rows)
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": report.rows}, indent=1))


if __name__ == "__main__":
    main()
