"""`agentinfer plan`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, cast

import attrs
import torch

from agentinfer.build import GIB, MemoryPlan, memory_plan
from agentinfer.cli.locate import locate
from agentinfer.cli.opened import one_line


def run(args: argparse.Namespace) -> int:
    """0. Raises Usage for a wrong model or setting."""
    memory_gib = machine_memory() / GIB if args.memory_gib is None else args.memory_gib
    with one_line(args):
        plan = memory_plan(
            locate(args.model, weights=False),
            memory_gib=memory_gib,
            dtype=args.dtype,
            tp=args.tp,
            block_size=args.block_size,
            kv_utilization=args.kv_utilization,
            reserve_gib=args.reserve_gib,
            max_model_len=args.max_model_len,
        )
    if args.json:
        print(json.dumps(attrs.asdict(plan)))
    else:
        print("\n".join(f"{name:<18}{value}" for name, value in table(plan, args.kv_utilization, args.reserve_gib)))
    return 0


def machine_memory() -> int:
    """Bytes of the first GPU; of the machine, if it has none."""
    if torch.cuda.is_available():
        return cast(Any, torch.cuda).get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(plan: MemoryPlan, utilization: float, reserve_gib: float) -> list[tuple[str, str]]:
    """*plan* in words, a line a fact."""
    devices = "1 device" if plan.tp == 1 else f"each of {plan.tp} devices"
    tokens = plan.num_blocks * plan.block_size
    lines = [
        ("architecture", f"{plan.architecture}, {plan.num_parameters:,} parameters in {plan.dtype}"),
        ("memory", f"{amount(plan.memory)} on {devices}"),
        ("weights", f"{amount(plan.weights)} (loading takes {amount(plan.largest_group)} more for a moment)"),
        ("KV a token", f"{plan.kv_per_token:,} bytes"),
        ("KV a block", f"{plan.kv_per_block:,} bytes, {plan.block_size} tokens"),
        (
            "blocks",
            f"{plan.num_blocks:,}, {tokens:,} tokens: (memory - weights - {reserve_gib:g} GiB) * {utilization:g}",
        ),
        ("longest context", f"{plan.longest_context:,} tokens"),
        ("at once", f"{plan.sequences_of_max_model_len:.2f} sequences of {plan.max_model_len:,} tokens"),
    ]
    if plan.num_blocks == 0:
        lines.append(("does not fit", "give it more --memory-gib or --tp, or a smaller --dtype or --reserve-gib"))
    elif plan.longest_context < plan.max_model_len:
        lines.append(("too small", f"for {plan.max_model_len:,} tokens: --max-model-len {plan.longest_context} fits"))
    return lines


def amount(count: int) -> str:
    """Bytes in GiB, or in MiB where that says more."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / (1 << 20):,.2f} MiB"
