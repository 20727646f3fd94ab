"""Decode steps of one row on a GPU: the persistent kernel's graph against Triton's, sampling included in both.

python benchmarks/gpu_persistent.py [--json FILE] [--models Qwen3-0.6B Qwen3-8B] [--contexts 128 1024 4096]
    [--seconds 100] [--changes SLOT=16384 FIRST=0,SLOT=32768 TICKS=1]

Dummy weights, bfloat16, blocks of 16. A row is the step of one context replayed over and over: milliseconds, the median
of 7 sets of 20 replays, and the time that weights and KV take at the best bandwidth. --changes also times the kernel
with these macros; with TICKS=1 it says where the time goes. What was measured is printed and written as it comes; a
variant that fails says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from agentinfer import graphs
from agentinfer.build import new_device
from agentinfer.models.model import dummy_model, kv_layout
from agentinfer.ops.choose import choose
from agentinfer.ops.comm import alone
from agentinfer.ops.persistent import Program, RowKernel, persistent_ops, where_late
from agentinfer.ops.provide import Ops
from agentinfer.state.limits import Limits
from agentinfer.state.policy import POLICIES
from agentinfer.steps import Machine

CUDA = torch.device("cuda", 0)
BANDWIDTH = 4.57e9
"""Bytes a millisecond that an H200 reads at best."""
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def machine_of(name: str, longest: int) -> tuple[Machine, Any]:
    """The model with Triton's ops, and the layouts of its KV."""
    model, weights = dummy_model(CONFIGS / name, torch.bfloat16, alone(CUDA), longest)
    heads = model.heads(model.config, 1)
    limits = Limits(
        block_size=16, num_blocks=longest // 16, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=longest,
        vocab_size=model.config.vocab_size,
    )  # fmt: skip
    ops, _ = choose("triton", CUDA, torch.bfloat16, heads, 16)
    machine = Machine(model, weights, ops, alone(CUDA), limits, POLICIES["throughput"], overlap=True)
    return machine, kv_layout(model, 1, 16)


def floor_of(m: Machine, context: int) -> float:
    """Milliseconds that reading the weights and the KV takes at best."""
    w = m.weights
    layers = sum(x.numel() * 2 for layer in w.layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down))
    c = m.model.config
    kv = 4 * context * c.num_layers * c.num_kv_heads * c.head_dim
    return (layers + w.head.numel() * 2 + kv) / BANDWIDTH


def captured(m: Machine, ops: Ops, layouts: Any) -> Any:
    """The graph of one row."""
    device = new_device(m.limits, layouts, CUDA)
    noise = torch.Generator(CUDA).manual_seed(1)
    for layer in device.kv.layers:
        layer.k.normal_(generator=noise)
        layer.v.normal_(generator=noise)
    made, device = graphs.capture(evolve(m, ops=ops), device, [1])
    device.kv.table[1] = torch.arange(1, device.kv.table.shape[1] + 1, dtype=torch.int32, device=CUDA)
    return made[1], device


def programs_of(ops: Ops) -> list[Program]:
    return list(ops.row_step.programs.values()) if isinstance(ops.row_step, RowKernel) else []


def timed(graph: Any, context: int) -> tuple[float, list[float]]:
    """(median, sets) of the step whose row has *context* keys."""
    block = graph.block
    block.positions.fill_(context - 1)
    block.slots.fill_(16 + context - 1)
    block.rows.fill_(1)
    block.context.fill_(context)
    block.inputs.fill_(1234)
    found = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            graph.graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(round(begin.elapsed_time(end) / 20, 4))
    return statistics.median(found[1:]), found[1:]


def variants(m: Machine, changes: list[str]) -> dict[str, Ops]:
    made = {"triton": m.ops, "persistent": persistent_ops(m.ops, CUDA)}
    for some in changes:
        macros = {name: int(value) for name, value in (x.split("=") for x in some.split(","))}
        made[f"persistent, {some}"] = persistent_ops(m.ops, CUDA, changes=macros)
    return made


PHASES = (
    "wait for x", "qkv", "wait for q", "see keys, send parts", "gather parts", "wait for heads", "o", "wait for out",
    "gate and up", "wait for act", "down", "send x",
)  # fmt: skip


def phases(ticks: torch.Tensor) -> dict[str, Any]:
    """Cycles between ticks, mean over layers but the first and the last and over blocks that attend; and at most of any
    block on average.
    """
    t = ticks[ticks[:, 0, 3] > 0].double()
    steps = torch.cat((t[:, 1:-1, 1:] - t[:, 1:-1, :-1], (t[:, 2:, 0] - t[:, 1:-1, 11])[..., None]), dim=-1).mean(1)
    mean, most = steps.mean(0).tolist(), steps.max(0).values.tolist()
    both = zip(PHASES, mean, most, strict=True)
    return {**{name: (round(a), round(b)) for name, a, b in both}, "layer": round(sum(mean))}


def measure(name: str, args: argparse.Namespace, end: float, rows: list[dict[str, Any]]) -> None:
    m, layouts = machine_of(name, max(args.contexts) + 64)
    print(f"{name}: weights after {time.monotonic() - args.begin:.1f} s", flush=True)
    best: dict[int, torch.Tensor] = {}
    for variant, ops in variants(m, args.changes).items():
        if time.monotonic() > end:
            print(f"{name}, {variant}: no time left", flush=True)
            continue
        try:
            from_ = time.monotonic()
            graph, device = captured(m, ops, layouts)
            took = time.monotonic() - from_
            for context in args.contexts:
                ms, sets = timed(graph, context)
                logits, floor = graph.logits_RV.clone(), floor_of(m, context)
                best.setdefault(context, logits)
                error = float((logits - best[context]).norm() / best[context].norm())
                row = {
                    "model": name, "variant": variant, "context": context, "ms": ms, "tok_s": round(1000 / ms, 1),
                    "floor_ms": round(floor, 4), "share": round(floor / ms, 3), "sets": sets,
                    "capture_s": round(took, 2), "to_triton": round(error, 5), "ok": graph.chosen[1].tolist(),
                }  # fmt: skip
                for program in programs_of(ops):
                    if len(program.mailbox.ticks):
                        row["phases"] = phases(program.mailbox.ticks)
                rows.append(row)
                print(row, flush=True)
            print(*(where_late(program.mailbox) for program in programs_of(ops)), flush=True)
            del graph, device
        except Exception:  # noqa: BLE001 - the other variants are still to be measured
            traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 1024, 4096])
    parser.add_argument("--changes", nargs="*", default=["FIRST=0", "SLOT=49152", "TICKS=1"])
    parser.add_argument("--seconds", type=float, default=100.0)
    args = parser.parse_args()
    args.begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        measure(name, args, args.begin + args.seconds, rows)
        torch.cuda.empty_cache()
        if args.json is not None:
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
