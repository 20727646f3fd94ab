"""schedule + commit in steady decode, beside a bare mutable scheduler, step by step in turn in one run.

    python benchmarks/scheduler.py [--json FILE]

Both sides do the same work on the same sizes: 24,576 blocks of 64, prompts of 512 to 575 tokens, prefix cache
on. The two alternate step by step, so that noise of the machine meets both. The last 64 states are kept and
must still be what they were.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from collections import deque
from pathlib import Path

import numpy as np
from mutable_baseline import one_step, ready

from agentinfer.state.admit import arrive
from agentinfer.state.check import violations
from agentinfer.state.commit import commit
from agentinfer.state.engine import EngineState, digest, initial
from agentinfer.state.limits import Limits
from agentinfer.state.plan import sampled
from agentinfer.state.policy import POLICIES, Policy, needs
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import schedule


def steady(n: int, policy: Policy) -> EngineState:
    """*n* sequences in decode."""
    rng = random.Random(0)
    state = initial(Limits(64, 24_576, n, 8_192, 4_096, 1_000, eos_ids=(1,)))
    for i in range(n):
        prompt = tuple(rng.randrange(2, 1000) for _ in range(512 + i % 64))
        state, _ = arrive(state, Request(prompt, SamplingParams(max_tokens=900)))
    while len(state.waiting) or (needs(state) > 1).any():
        state, plan = schedule(state, policy)
        state, _ = commit(state, plan, sampled(plan, [7] * len(plan.samples)))
    return state


def compare(n: int, policy: Policy, steps: int) -> dict[str, float]:
    """Microseconds a step of both sides, medians over *steps*."""
    state, yardstick = steady(n, policy), ready(n, 64, 24_576)
    tokens = np.full(n, 7, np.int32)
    kept: deque[tuple[EngineState, str]] = deque(maxlen=64)
    ours: list[float] = []
    theirs: list[float] = []
    gc.collect()
    gc.freeze()
    for i in range(steps):
        begin = time.perf_counter_ns()
        state, plan = schedule(state, policy)
        state, _ = commit(state, plan, sampled(plan, tokens))
        ours.append((time.perf_counter_ns() - begin) / 1e3)
        theirs.append(one_step(yardstick))
        if i >= steps - 64:
            kept.append((state, digest(state)))
    assert len(state.order) == n
    assert all(digest(old) == name and not violations(old) for old, name in list(kept)[::8]), "an old state changed"
    mine, bare = statistics.median(ours), statistics.median(theirs)
    return {"rows": n, "us": round(mine, 1), "yardstick_us": round(bare, 1), "ratio": round(mine / bare, 2)}


def main() -> None:
    """Measure and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = [
        {"policy": name, **compare(n, policy, args.steps)}
        for name, policy in POLICIES.items()
        for n in (8, 64, 256, 1024)
    ]
    for row in rows:
        print(
            "{policy:>10} {rows:5} rows: {us:8.1f} us, yardstick {yardstick_us:8.1f} us, ratio {ratio:.2f}".format(
                **row
            )
        )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": platform.processor() or platform.machine(), "steps": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
