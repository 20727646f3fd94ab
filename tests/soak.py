"""Random programs against the control plane for as long as it takes: both policies, with and without overlap.

    python tests/soak.py [--programs 20000] [--jobs N] [--seed N] [--steps 50]

Each job runs its share of each of the four machines with a seed of its own, in batches, and prints what it did. The
first Fault, shrunk by Hypothesis, ends the soak with status 1; the batch's seed, printed with it, repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from agentinfer.state.policy import POLICIES
from agentinfer.testing import engine_machine

BATCH = 250
Job = tuple[str, bool, int, int, int]
"""Policy, overlap, programs, steps a program, seed."""


def batch(job: Job) -> tuple[Job, Counter[str], str]:
    """Run one batch; what its programs did, and the report of a Fault, empty if there was none."""
    policy, overlap, programs, steps, number = job
    done: Counter[str] = Counter()

    class Counting(engine_machine(POLICIES[policy], overlap=overlap)):
        """The machine, and a count of what it saw."""

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "drive"):
                plans = self.drive.plans
                done["programs"] += 1
                done["events"] += len(self.drive.events)
                done["steps"] += len(plans)
                done["preemptions"] += sum(len(plan.preempted) for plan in plans)
                done["copies"] += sum(len(plan.copies) for plan in plans)
                done.update(over.reason for over in self.drive.over.values())

    chosen = settings(
        max_examples=programs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(Counting), settings=chosen)
    except BaseException:  # noqa: BLE001 - whatever it is, the soak reports it
        return job, done, traceback.format_exc()
    return job, done, ""


def jobs(programs: int, steps: int, first_seed: int) -> list[Job]:
    """Batches that are *programs* in all, or a few more, over the four machines in turn."""
    kinds = [(policy, overlap) for policy in POLICIES for overlap in (False, True)]
    size = min(BATCH, -(-programs // len(kinds)))
    count = -(-programs // (size * len(kinds))) * len(kinds)
    return [(*kinds[i % len(kinds)], size, steps, first_seed + i) for i in range(count)]


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Random programs against the control plane.")
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=50, help="rules a program")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=None, help="of the first batch (default: drawn and printed)")
    asked = parser.parse_args()
    first = random.SystemRandom().getrandbits(31) if asked.seed is None else asked.seed
    todo, total, began = jobs(asked.programs, asked.steps, first), Counter[str](), time.perf_counter()
    print(f"{len(todo)} batches of {todo[0][2]} programs, seeds {first} to {first + len(todo) - 1}", flush=True)
    with ProcessPoolExecutor(asked.jobs) as pool:
        for future in as_completed([pool.submit(batch, job) for job in todo]):
            (policy, overlap, _, _, number), done, fault = future.result()
            total += done
            took_s = time.perf_counter() - began
            print(f"{took_s:7.0f} s {policy}, overlap {overlap}, seed {number}: {total['programs']} done", flush=True)
            if fault:
                print(fault)
                pool.shutdown(cancel_futures=True)
                return 1
    print(", ".join(f"{n} {what}" for what, n in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
