"""`agentinfer plan`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, cast

import attrs
import torch

from agentinfer.build import CPU_KV_GIB, GIB
from agentinfer.cli.locate import locate
from agentinfer.cli.opened import one_line
from agentinfer.memory import MemoryPlan, memory_plan


def run(args: argparse.Namespace) -> int:
    """0. Raises Usage for a wrong model or setting."""
    memory_gib = machine_memory() / GIB if args.memory_gib is None else args.memory_gib
    on_cpu = args.memory_gib is None and not torch.cuda.is_available()
    kv_gib = CPU_KV_GIB if on_cpu and args.kv_gib is None else args.kv_gib
    with one_line(args):
        plan = memory_plan(
            locate(args.model, weights=False),
            memory_gib=memory_gib,
            kv_gib=kv_gib,
            dtype=args.dtype,
            fp8=args.fp8,
            tp=args.tp,
            ep=args.ep,
            block_size=args.block_size,
            kv_utilization=args.kv_utilization,
            reserve_gib=args.reserve_gib,
            max_model_len=args.max_model_len,
        )
    if args.json:
        print(json.dumps(attrs.asdict(plan)))
    else:
        rule = f"(memory - weights - {args.reserve_gib:g} GiB) * {args.kv_utilization:g}"
        if kv_gib is not None:
            rule = f"{kv_gib:g} GiB" + (", as on a CPU (--kv-gib gives more)" if args.kv_gib is None else "")
        print("\n".join(f"{name:<18}{value}" for name, value in table(plan, rule)))
    return 0


def machine_memory() -> int:
    """Bytes of the first GPU; of the machine, if it has none."""
    if torch.cuda.is_available():
        return cast(Any, torch.cuda).get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(plan: MemoryPlan, rule: str) -> list[tuple[str, str]]:
    """*plan* in words, a line a fact. *rule*: how much of the memory KV takes."""
    devices = "1 device" if plan.tp == 1 else f"each of {plan.tp} devices"
    tokens = plan.num_blocks * plan.block_size
    lines = [
        ("architecture", f"{plan.architecture}, {plan.num_parameters:,} parameters in {plan.dtype}"),
        ("memory", f"{amount(plan.memory)} on {devices}"),
        ("weights", f"{amount(plan.weights)} (loading takes {amount(plan.largest_group)} more for a moment)"),
        ("KV a token", f"{plan.kv_per_token:,} bytes"),
        ("KV a block", f"{plan.kv_per_block:,} bytes, {plan.block_size} tokens"),
        ("blocks", f"{plan.num_blocks:,}, {tokens:,} tokens: {rule}"),
        ("longest context", f"{plan.longest_context:,} tokens"),
        ("at once", f"{plan.sequences_of_max_model_len:.2f} sequences of {plan.max_model_len:,} tokens"),
    ]
    if plan.quantized:
        kept = f"held in {plan.dtype}" if plan.fp8 == "dequantize" else "held so (not kv_b, embedding and head)"
        lines.insert(3, ("", f"the checkpoint's are in 8 bits; they are {kept}"))
    if plan.num_blocks == 0:
        lines.append(("does not fit", "give it more --memory-gib or --tp, or a smaller --dtype or --reserve-gib"))
    elif plan.longest_context < plan.max_model_len:
        fits = f"for {plan.max_model_len:,} tokens: --max-model-len {plan.longest_context} fits"
        lines.append(("too small", f"{fits}, and is what the engine takes where nobody asks for more"))
    return lines


def amount(count: int) -> str:
    """Bytes in GiB, or in MiB where that says more."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / (1 << 20):,.2f} MiB"
