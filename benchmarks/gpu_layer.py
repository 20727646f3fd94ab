"""Every part of a decode layer with latent attention and experts on a GPU, and the whole one, in a captured graph over
cold memory, by our kernels and by vLLM's, against the time that their bytes take.

    python benchmarks/gpu_layer.py [--json FILE] [--seconds S] [--model V2-Lite] [--rows 1 64 256] [--contexts 256 1024]

Tiles are those of the rules; `gpu_experts.py` tries others. Ours comes first, then vLLM's where it is, whose import
takes long. "experts" are the routed ones, which vLLM sorts, multiplies and sums; "attend" is all from the query to the
heads' output. The floor is what must be read at 4.57 TB/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_experts import CUDA, MODELS, Report, Sizes, Weights, rand
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import kv as kvs
from agentinfer.ops import vllm_latent, vllm_moe
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import Site, chosen
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kernels.attend_latent import absorb
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.provide import LayerShape, Ops, Stream


class Step:
    """A decode step of some rows, all of the same number of keys, over a few layers' weights and caches."""

    def __init__(self, s: Sizes, w: Weights, rows: int, context: int) -> None:
        self.s, self.w, self.rows, self.context, self.tp = s, w, rows, context, alone().tp
        self.copies, self.caches = w.copies, {}
        self.down = [rand(s.heads * 192 + 576, s.model, scale=s.model**-0.5) for _ in range(self.copies)]
        self.out = [rand(s.model, s.heads * 128, scale=0.02) for _ in range(self.copies)]
        self.kv_b = [rand(s.heads, 256, 512, scale=0.05) for _ in range(self.copies)]
        self.angles, self.kv_norm = rand(context, 64, dtype=torch.float32), rand(512)
        self.residual, self.heads = rand(rows, s.model, dtype=torch.float32), rand(rows, s.heads * 128)
        self.both = rand(rows, s.heads * 192 + 576)
        self.routes = torch.rand(rows, s.experts, device=CUDA).topk(s.routing.top_k).indices
        self.weights = rand(rows, s.routing.top_k, dtype=torch.float32).abs()

    def site(self, block: int) -> Site:
        latent = self.s.latent
        shape = LayerShape(
            HeadShape(self.s.heads, 1, latent.cached_dim), latent,
            ExpertShape(self.s.experts, self.s.routing.top_k, self.s.width),
        )  # fmt: skip
        return Site.of(CUDA, torch.bfloat16, shape, block)

    def over(self, block: int) -> tuple[list[LayerKv], Inputs]:
        """Caches in blocks of that size, and the inputs as a captured step has them."""
        if block not in self.caches:
            columns, order = -(-self.context // block), torch.arange(self.rows, device=CUDA)
            layout = kvs.mla(block, 512, 64, torch.bfloat16)
            planes = [rand(self.rows * columns + 1, block, 1, 576) for _ in range(self.copies)]
            table = (torch.randperm(self.rows * columns, device=CUDA) + 1).int().view(self.rows, columns)
            x = Inputs(
                ids=order, positions=torch.full_like(order, self.context - 1), rows=order, table=table,
                slots=table[:, -1].long() * block + (self.context - 1) % block, max_query=1, max_context=self.context,
                cu_seqlens_q=torch.arange(self.rows + 1, device=CUDA, dtype=torch.int32), samples=order,
                context=torch.full((self.rows,), self.context, device=CUDA, dtype=torch.int32), last_rows=order,
                last_samples=order, host=None,
            )  # fmt: skip
            self.caches[block] = [LayerKv(i, layout, plane, None) for i, plane in enumerate(planes)], x
        return self.caches[block]

    def attend(self, ops: Ops, block: int, i: int) -> Tensor:
        kv, x = self.over(block)
        return self._attend(ops, self.both[:, :-576], self.both[:, -576:], kv[i], x, i)

    def _attend(self, ops: Ops, q: Tensor, latent: Tensor, kv: LayerKv, x: Inputs, i: int) -> Tensor:
        return ops.attend_latent(
            q, latent, kv, x, self.s.latent, self.angles, self.kv_norm, self.kv_b[i], 0.07, 1e-6
        )  # fmt: skip

    def layer(self, ops: Ops, block: int, i: int) -> Stream:
        """All of a layer of experts."""
        (kv, x), w, s = self.over(block), self.w, self.s
        q, latent, stream = ops.norm_latent(
            Stream(self.residual, None), w.norm, self.down[i], None, None, s.latent, 1e-6, 1e-6
        )
        stream = ops.out_add(self._attend(ops, q, latent, kv[i], x, i), self.out[i], None, stream, self.tp)
        *work, stream = ops.norm_route(stream, w.norm, w.router, w.bias, s.routing, 1e-6)
        return ops.experts_add(*work, w.gate_up[i], w.down[i], *w.shared[i], stream, self.tp)

    def bytes(self) -> dict[str, float]:
        """What each part must read."""
        s, used = self.s, len(self.routes.unique())
        return {
            "q, latent": self.down[0].nbytes, "attend": self.rows * self.context * 1152 + self.kv_b[0].nbytes,
            "out": self.out[0].nbytes, "route": self.w.router.nbytes, "experts": 6 * s.model * s.width * used,
            "shared": 6 * s.model * s.shared,
        }  # fmt: skip


BLOCKS = {"triton": 16, "fa3-mla": 16, "flashmla": 64, "vllm-moe": 16}
"""Providers of a step, and tokens a block."""


def step_parts(t: Step, report: Report) -> None:
    """Each part of a layer by our kernels, products by cuBLAS beside."""
    ops, _ = chosen("triton", t.site(16))
    size, w, stream = t.bytes(), t.w, Stream(t.residual, None)
    x = rand(t.rows, t.s.model)
    none = torch.zeros(t.rows, t.s.model, device=CUDA)

    def timed(name: str, size: float, call: Callable[[int], Any]) -> None:
        report.time(name, t.rows, size, t.copies, lambda i, _: call(i))

    timed("q, latent", size["q, latent"], lambda i: ops.norm_qkv(stream, w.norm, t.down[i], None, 1e-6))
    timed("q, latent: cuBLAS", size["q, latent"], lambda i: x @ t.down[i].T)
    timed(f"attend {t.context}", size["attend"], lambda i: t.attend(ops, 16, i))
    timed("absorb", t.kv_b[0].nbytes / 2, lambda i: absorb(t.both[:, :-576], t.kv_b[i], 128, pdl=True))
    timed("out", size["out"], lambda i: ops.out_add(t.heads, t.out[i], None, Stream(none, None), t.tp))
    timed("out: cuBLAS", size["out"], lambda i: t.heads @ t.out[i].T)
    timed("route", size["route"], lambda _: ops.norm_route(stream, w.norm, w.router, w.bias, t.s.routing, 1e-6))
    some = (x, t.weights, t.routes)

    def experts(i: int, *shared: Tensor | None) -> Stream:
        return ops.experts_add(*some, w.gate_up[i], w.down[i], *shared, Stream(none, None), t.tp)

    timed("experts", size["experts"], lambda i: experts(i, None, None))
    if t.s.shared:
        timed("experts, shared", size["experts"] + size["shared"], lambda i: experts(i, *w.shared[i]))


def step_head(t: Step, report: Report) -> None:
    """The last norm and the head's product."""
    ops, s = chosen("triton", t.site(16))[0], t.s
    head, every = rand(s.vocabulary, s.model, scale=0.02), torch.arange(t.rows, device=CUDA)
    report.time(
        "head", t.rows, head.nbytes, 1,
        lambda _, __: ops.norm_head(
            Stream(t.residual, None), every, t.w.norm, head, 1e-6, t.tp, s.vocabulary
        ),
    )  # fmt: skip


def step_layers(t: Step, report: Report) -> None:
    """The whole layer, by every provider that is here."""
    for name, block in BLOCKS.items():
        try:
            ops, _ = chosen(name, t.site(block))
        except InvalidSetting as error:
            refused(report, f"layer {t.context}: {name}", t.rows, error)
            continue
        layer = f"layer {t.context}: {name}"
        report.time(layer, t.rows, sum(t.bytes().values()), t.copies, lambda i, _, o=ops, b=block: t.layer(o, b, i))


def step_by_vllm(t: Step, report: Report) -> None:
    """vLLM's kernels for latents and experts, each alone."""
    size = t.bytes()
    for name, (kernel, *_) in vllm_latent.KERNELS.items():
        try:
            ops, _ = chosen(name, t.site(BLOCKS[name]))
        except InvalidSetting as error:
            refused(report, f"attend {t.context}: {name}", t.rows, error)
            continue
        block, (kv, x) = BLOCKS[name], t.over(BLOCKS[name])
        report.time(
            f"attend {t.context}: {name}", t.rows, size["attend"], t.copies,
            lambda i, _, o=ops, b=block: t.attend(o, b, i),
        )  # fmt: skip
        q = rand(t.rows, t.s.heads, 576)
        report.time(
            f"attend {t.context}: {name}, its kernel alone", t.rows, size["attend"] - t.kv_b[0].nbytes, t.copies,
            lambda i, _, k=kernel, kv=kv, x=x, q=q: k(q, kv[i], x, 0.07),
        )  # fmt: skip
    try:
        fused_experts = vllm_moe.load()
    except InvalidSetting as error:
        refused(report, "experts: vllm-moe", t.rows, error)
        return
    a = rand(t.rows, t.s.model)
    report.time(
        "experts: vllm-moe", t.rows, size["experts"], t.copies,
        lambda i, _: fused_experts(
            hidden_states=a, w1=t.w.gate_up[i], w2=t.w.down[i], topk_weights=t.weights, topk_ids=t.routes
        ),
    )  # fmt: skip


def step(s: Sizes, w: Weights, rows: list[int], contexts: list[int], report: Report) -> None:
    """Ours first, then vLLM's, whose import takes long."""
    steps = [Step(s, w, n, context) for n in rows for context in contexts]
    for t in steps:
        if t.context == contexts[0]:
            step_parts(t, report)
            step_head(t, report)
    for t in steps:
        step_layers(t, report)
    for t in steps:
        step_by_vllm(t, report)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Microseconds of each kernel (and its part of the floor) by number of rows, as Markdown."""
    counts = sorted({row["rows"] for row in rows})
    found = {(row["kernel"], row["rows"]): row for row in rows}
    yield f"| kernel, us (floor / time) | {' | '.join(f'{n} rows' for n in counts)} |"
    yield "|---" * (len(counts) + 1) + "|"
    for name in dict.fromkeys(row["kernel"] for row in rows):
        cells = [found.get((name, n), {}) for n in counts]
        words = [f"{x['us']:.1f} ({x['share']:.2f})" if "us" in x else x.get("error", "-")[:40] for x in cells]
        yield f"| {name} | {' | '.join(words)} |"


def refused(report: Report, name: str, rows: int, error: InvalidSetting) -> None:
    """*name* is not there, and why."""
    report.rows.append({"kernel": name, "rows": rows, "error": str(error)})
    print(f"{name} | {rows} | {error}", flush=True)


def main() -> None:
    """Measure until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=105)
    parser.add_argument("--model", default="V2-Lite", choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    asked = parser.parse_args()
    report, s = Report(asked.seconds, defaults=True), MODELS[asked.model]
    try:
        step(s, Weights(s), asked.rows, asked.contexts, report)
    finally:
        print(*table(report.rows), sep="\n", flush=True)
        if asked.json:
            found = {"device": torch.cuda.get_device_name(), "model": asked.model, "rows": report.rows}
            asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
