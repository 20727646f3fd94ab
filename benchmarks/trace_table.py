"""Where a step's time goes: the kernels of a trace that `agentinfer bench --profile` wrote, per step.

    python benchmarks/trace_table.py TRACE.json[.gz] [--steps 16] [--top 30]

Busy is the union of all kernels and copies on the GPU (with PDL they overlap, so their times add up to more), idle the
rest of the time between the first and the last of them.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
from pathlib import Path

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def events_of(path):
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    found = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in KINDS and "dur" in e]
    return sorted(found, key=lambda e: e["ts"])


def union(events):
    """Microseconds in which at least one of *events* runs."""
    total, end = 0.0, float("-inf")
    for e in events:
        stop = e["ts"] + e["dur"]
        if stop > end:
            total += stop - max(e["ts"], end)
            end = stop
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=16, help="steps in the trace (default: %(default)s)")
    parser.add_argument("--top", type=int, default=30)
    args = parser.parse_args()
    events = events_of(args.trace)
    if not events:
        raise SystemExit(f"{args.trace}: nothing ran on a GPU")
    span = max(e["ts"] + e["dur"] for e in events) - events[0]["ts"]
    busy = union(events)
    n = args.steps
    print(
        f"a step: {span / n:.1f} us, busy {busy / n:.1f}, idle {(span - busy) / n:.1f}, {len(events) / n:.1f} kernels"
    )
    times = collections.defaultdict(list)
    for e in events:
        times[e["name"]].append(e["dur"])
    print("| kernel | a step | us each | us a step |\n|---|---|---|---|")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[: args.top]:
        print(f"| {name[:100]} | {len(each) / n:.1f} | {sum(each) / len(each):.2f} | {sum(each) / n:.1f} |")


if __name__ == "__main__":
    main()
