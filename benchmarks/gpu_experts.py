"""Kernels of latent attention and experts on a GPU, in a captured graph over cold memory, against the time that their
bytes take.

    python benchmarks/gpu_experts.py [--json FILE] [--seconds S] [--model V2-Lite] [--rows 1 8 64 256]
        [--contexts 256 1024 4096] [--only experts route latent one] [--defaults]

Each is first timed with the tile that the rule gives, then with candidates in turn, as long as there is time; a
candidate that does not fit says so. The floor is what must be read (weights of the experts that are chosen, latents)
at 4.57 TB/s. "expert set": sorting and both products of all positions; "layer": norm, router, choice, experts and
shared ones as in a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import astuple, frozen
from gpu_time import captured
from torch import Tensor

from agentinfer.ops import experts as ours
from agentinfer.ops.comm import alone
from agentinfer.ops.kernels.attend_latent import LatentTile, absorb, attend_latent, latent_tile
from agentinfer.ops.kernels.expert_gemm import ExpertTile, expert_gemm, expert_tile
from agentinfer.ops.kernels.expert_gemv import down_tile, expert_gemv
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.route import choose_experts, router_logits
from agentinfer.ops.kernels.tiles import GemvTile, gemv_tile
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import Routing
from agentinfer.ops.provide import Stream
from agentinfer.ops.triton_ops import launch_on

CUDA = torch.device("cuda")
BANDWIDTH = 4.57e6
"""Bytes a microsecond that a kernel reads at best on an H200."""
COLD = 220 << 20
"""Bytes that must lie between two uses of the same memory."""


@frozen
class Sizes:
    """Of a model."""

    model: int
    heads: int
    experts: int
    width: int
    shared: int
    routing: Routing
    vocabulary: int

    @property
    def latent(self) -> LatentShape:
        """The heads of latent attention."""
        return LatentShape(self.heads, 128, 64, 512, 128)


V3 = Routing(8, "sigmoid", normalise=True, scale=2.5, groups=8, kept_groups=4, group_score="top2")
MODELS = {
    "V2-Lite": Sizes(2048, 16, 64, 1408, 2816, Routing(6, "softmax", normalise=False), 102400),
    "V3": Sizes(7168, 128, 256, 2048, 2048, V3, 129280),
    "V3-tp8": Sizes(7168, 16, 256, 256, 256, V3, 16160),
    "Qwen3-30B": Sizes(2048, 32, 128, 768, 0, Routing(8, "softmax", normalise=True), 151936),
}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=dtype) * scale


class Report:
    """The rows so far. Mutable."""

    def __init__(self, seconds: float, *, defaults: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.end = time.monotonic() + seconds
        self.defaults = defaults

    def late(self) -> bool:
        return time.monotonic() > self.end

    def time(
        self, name: str, rows: int, size: float, copies: int, call: Callable[[int, Any], Any], tile: Any = None,
        candidates: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Time *call* with *tile*, then the *candidates*."""
        floor, best = size / BANDWIDTH, None
        for one in (tile, *(() if self.defaults else candidates)):
            if self.late() or (best is not None and one == tile):
                continue
            how = "" if one is None else str(astuple(one) if hasattr(one, "__attrs_attrs__") else one)
            row = {"kernel": name, "rows": rows, "how": how, "floor_us": floor}
            try:
                row["us"] = captured(lambda i, one=one: call(i, one), copies, launches=16)
                row["share"] = floor / row["us"]
                best = min(row, best or row, key=lambda r: r["us"])
            except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
                row["error"] = f"{type(error).__name__}: {error}"[:120]
            self.rows.append(row)
            print(" | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
        if best is not None and candidates and not self.defaults:
            print(f"  best of {name}, {rows} rows: {best['us']:.2f} us by {best['how']}", flush=True)


class Weights:
    """Some layers of experts, which together do not fit the cache."""

    def __init__(self, s: Sizes) -> None:
        one = 6 * s.width * s.model
        self.copies = max(1, min(8, -(-COLD // (one * s.routing.top_k))))
        if one * s.experts > COLD:
            self.copies = 2
        self.gate_up = [rand(s.experts, 2 * s.width, s.model, scale=s.model**-0.5) for _ in range(self.copies)]
        self.down = [rand(s.experts, s.model, s.width, scale=s.width**-0.5) for _ in range(self.copies)]
        self.shared = [
            (rand(2 * s.shared, s.model, scale=0.02), rand(s.model, s.shared, scale=0.02)) if s.shared else (None, None)
            for _ in range(self.copies)
        ]
        self.router, self.norm = rand(s.experts, s.model, dtype=torch.float32, scale=s.model**-0.5), rand(s.model)
        self.bias = rand(s.experts, dtype=torch.float32, scale=0.1) if s.routing.scoring == "sigmoid" else None


def one_row(s: Sizes, w: Weights, report: Report) -> None:
    """The experts of a single position; another choice a copy, so that little of it is in the cache."""
    x, residual, weights = rand(1, s.model), rand(1, s.model, dtype=torch.float32), rand(1, s.routing.top_k).float()
    routes = [torch.randperm(s.experts, device=CUDA)[: s.routing.top_k][None] for _ in range(8 * w.copies)]
    more = s.shared // s.width
    size = 6 * s.model * (s.routing.top_k * s.width + s.shared)

    def call(i: int, tiles: tuple[GemvTile, GemvTile]) -> Tensor:
        n = i % w.copies
        return expert_gemv(
            x, weights, routes[i], w.gate_up[n], w.down[n], *w.shared[n], residual, pdl=True, tiles=tiles
        )  # fmt: skip

    first = gemv_tile((s.routing.top_k + more) * s.width, s.model, gated=True)
    second = down_tile(s.model, s.width)
    tiles = [(GemvTile(r, c, n), second) for r, c, n in itertools.product((2, 4, 1, 8), (2048, 1024), (4, 8, 2))]
    tiles += [(first, GemvTile(r, c, n)) for r, c, n in itertools.product((4, 2, 8), (2048, 512, 1024), (4, 8, 2))]
    report.time("experts of one", 1, size, len(routes), call, (first, second), tiles)


def expert_sets(s: Sizes, w: Weights, rows: int, report: Report) -> None:
    """Sorting and both products, and the whole half of a layer."""
    x, weights = rand(rows, s.model), rand(rows, s.routing.top_k, dtype=torch.float32).abs()
    routes = torch.rand(rows, s.experts, device=CUDA).topk(s.routing.top_k).indices
    used = len(routes.unique())
    size = 6 * s.model * s.width * used
    out = torch.empty(s.routing.top_k, rows, s.model, device=CUDA)

    def call(i: int, tile: ExpertTile) -> None:
        sorted_ = expert_rows(routes, s.experts, tile.rows, pdl=True)
        expert_gemm(x, weights, sorted_, w.gate_up[i], w.down[i], out, pdl=True, tile=tile)

    default = expert_tile(rows * s.routing.top_k, s.experts, 2)
    # Each takes seconds to compile: the likely ones first.
    tall = (default.rows, min(128, default.rows * 2), max(16, default.rows // 2))
    tiles = [
        ExpertTile(m, n, k, stages, 8 if m * n >= 8192 else 4)
        for m, (n, k), stages in itertools.product(
            dict.fromkeys(tall), ((64, 128), (32, 128), (64, 64), (128, 64), (32, 256)), (3, 4)
        )
        if stages * k * (m + 2 * n) * 2 <= 220 << 10
    ]
    report.time("expert set", rows, size, w.copies, call, default, tiles)
    report.time("expert rows", rows, 0, 1, lambda _, __: expert_rows(routes, s.experts, default.rows, pdl=True))

    residual = rand(rows, s.model, dtype=torch.float32)
    run, tp = launch_on(CUDA), alone().tp

    def layer(i: int, _: Any) -> Stream:
        *work, stream = ours.norm_route(run, Stream(residual, None), w.norm, w.router, w.bias, s.routing, 1e-6)
        return ours.experts_add(run, *work, w.gate_up[i], w.down[i], *w.shared[i], stream, tp)

    report.time("layer", rows, size + 6 * s.model * s.shared, w.copies, layer)


def routing(s: Sizes, w: Weights, rows: int, report: Report) -> None:
    """The router's product and the choice."""
    x = rand(rows, s.model)
    logits = router_logits(x, w.router)
    report.time("router", rows, w.router.nbytes + x.nbytes, 1, lambda _, __: router_logits(x, w.router, pdl=True))
    wide = w.router.t().contiguous()
    report.time("router by cuBLAS", rows, w.router.nbytes + x.nbytes, 1, lambda _, __: x.float() @ wide)
    report.time("choice", rows, logits.nbytes, 1, lambda _, __: choose_experts(logits, w.bias, s.routing, pdl=True))


def latents(s: Sizes, rows: int, context: int, report: Report) -> None:
    """Decode attention: absorbed query, attention, values."""
    columns = -(-context // 16)
    size = rows * context * 576 * 2
    copies = int(min(24, max(1, -(-COLD // size))))
    caches = [rand(rows * columns + 1, 16, 1, 576) for _ in range(copies)]
    kv_b = [rand(s.heads, 256, 512, scale=0.05) for _ in range(copies)]
    table = (torch.randperm(rows * columns, device=CUDA) + 1).int().view(rows, columns)
    order, lengths = torch.arange(rows, device=CUDA), torch.full((rows,), context, device=CUDA, dtype=torch.int32)
    slots = table[:, -1].long() * 16 + (context - 1) % 16
    both, angles, norm = rand(rows, s.heads * 192 + 576), rand(context, 64, dtype=torch.float32), rand(512)

    def call(i: int, tile: LatentTile) -> Tensor:
        return attend_latent(
            both[:, :-576], both[:, -576:], caches[i], table, order, lengths, slots, 128, angles, norm, kv_b[i], 1e-6,
            0.1, interleaved=True, pdl=True, tile=tile,
        )  # fmt: skip

    default = latent_tile(rows, s.heads, 2)
    heads = (default.heads,) if s.heads <= 16 else (16, 32, 64)
    tiles = [
        LatentTile(splits, keys, h, warps, stages, 64)
        for splits, h, (keys, warps, stages) in itertools.product(
            (1, 2, 4, 8, 16, 32, 64), heads, ((32, 4, 2), (64, 4, 2), (64, 8, 2), (32, 4, 3))
        )
        if (splits == 1 or rows * splits <= 1024) and splits * 32 <= 2 * context and (rows <= 8 or splits <= 8)
    ]
    name = f"latents, context {context}"
    report.time(name, rows, size + kv_b[0].nbytes, copies, call, default, tiles)
    report.time("absorb", rows, kv_b[0].nbytes / 2, copies, lambda i, _: absorb(both[:, :-576], kv_b[i], 128, pdl=True))


def main() -> None:
    """Measure until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--model", default="V2-Lite", choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parts = ("one", "route", "experts", "latent")
    parser.add_argument("--only", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--defaults", action="store_true")
    asked = parser.parse_args()
    report, s = Report(asked.seconds, defaults=asked.defaults), MODELS[asked.model]
    if set(asked.only) & {"one", "route", "experts"}:
        w = Weights(s)
        if "one" in asked.only:
            one_row(s, w, report)
        for rows in asked.rows:
            if "route" in asked.only:
                routing(s, w, rows, report)
            if "experts" in asked.only and rows > 1:
                expert_sets(s, w, rows, report)
    if "latent" in asked.only:
        for rows, context in itertools.product(asked.rows, asked.contexts):
            latents(s, rows, context, report)
    if asked.json:
        found = {"device": torch.cuda.get_device_name(), "model": asked.model, "rows": report.rows}
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
