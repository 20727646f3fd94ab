"""What sampling costs: rows of logits with mixed parameters against greedy ones, and in the steps of a whole engine.

    python benchmarks/gpu_sampling.py [--rows 256] [--vocab 151936] [--steps 100] [--engine FOLDER] [--json FILE]

First the part of a decode step that follows the logits, as a replay does it: the choice of all rows (in a graph, on a
GPU), then the edits and the second choice of rows that ask for them. "device_us" is the time between events on the
GPU's stream, "host_us" what the host takes to launch it; on a CPU they are one. With --engine also decode steps of a
model (its config.json is enough) with the same parameters in steady state, in milliseconds, overlap and all.

Parameters: "greedy"; "plain" is temperature 0.8 alone; "cold" is plain at temperature 0.001: the noise is paid for and
greedy's tokens are chosen, so that what differs from "plain" is what other tokens cost in the rest of the step;
"filters" has top-k, top-p, min-p and none of them on a quarter of the rows each; "edits" is plain with penalties on a
quarter, bias on a quarter; "mixed" is greedy, plain, top-k with top-p, and min-p on a quarter each, with penalties on
every fourth row and bias on every fourth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentinfer.build import Settings
from agentinfer.graphs import _after, left_of
from agentinfer.loop import Engine, open_engine
from agentinfer.ops.comm import alone
from agentinfer.ops.edit import no_tables, tell
from agentinfer.ops.provide import Ops, reference
from agentinfer.ops.sample import idle, words
from agentinfer.state.admit import arrive
from agentinfer.state.commit import commit
from agentinfer.state.engine import initial
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Plan, sampled
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import rebase, schedule
from agentinfer.steps import Device, Machine

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05})
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05})


def params(case: str, i: int, vocab: int) -> SamplingParams:
    """Of row *i*."""
    edits = {0: PENALTIES, 2: {"logit_bias": {(7 * i + j) % vocab: 1.0 for j in range(20)}}}.get(i // 4 % 4, {})
    asked: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "cold": {"temperature": 1e-3},
        "plain": {},
        "filters": FILTERS[i % 4],
        "edits": edits,
        "mixed": {**KINDS[i % 4], **edits},
    }[case]
    return SamplingParams(**{"temperature": 0.8, "seed": i, "max_tokens": 900, "ignore_eos": True, **asked})


CASES = ("greedy", "plain", "filters", "edits", "mixed")
STEP_CASES = ("greedy", "cold", "plain", "filters", "edits", "mixed")


def limits_of(rows: int, vocab: int) -> Limits:
    """Of an engine that holds *rows* and no more."""
    return Limits(16, 80 * rows, rows, 64 * rows, 1024, vocab)


def decode_plan(case: str, rows: int, vocab: int) -> Plan:
    """A step of *rows* in decode, told as to a new device."""
    state = initial(limits_of(rows, vocab))
    for i in range(rows):
        state, _ = arrive(state, Request(tuple((31 * i + j) % vocab for j in range(32)), params(case, i, vocab)))
    for _ in range(3):
        state, plan = schedule(state)
        assert plan is not None
        state, _ = commit(state, plan, sampled(plan, np.arange(rows) % vocab))
    state, plan = schedule(state)
    assert plan is not None
    return rebase(state, plan, -2)


def chooser(
    ops: Ops, logits: torch.Tensor, plan: Plan, chosen: torch.Tensor, left: Sequence[int]
) -> Callable[[], None]:
    """What a graph does with the logits, but for samples that are *left*."""
    s = idle(plan.sampling, left)
    if ops.sample_rows is None:

        def on_host() -> None:
            tokens, ok = ops.sample(logits, s)
            chosen[0], chosen[1] = tokens, ok

        return on_host
    asked, index = (torch.from_numpy(column.copy()).to(logits.device) for column in (words(s), s.index))
    run = ops.sample_rows
    if logits.device.type != "cuda":
        return lambda: run(logits, asked, index, chosen[0], chosen[1])
    run(logits, asked, index, chosen[0], chosen[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(logits, asked, index, chosen[0], chosen[1])
    return graph.replay


def after_logits(ops: Ops, case: str, raw: torch.Tensor, steps: int) -> dict[str, float]:
    """Medians of what follows the logits, in microseconds."""
    rows, vocab = raw.shape
    plan, device, cuda = decode_plan(case, rows, vocab), raw.device, raw.device.type == "cuda"
    tables = tell(no_tables(vocab, device), plan.told)
    logits, chosen = raw.clone(), torch.zeros((2, rows), dtype=torch.int64, device=device)
    unused: Any = None
    m = Machine(unused, unused, ops, alone(device), limits_of(rows, vocab), unused, overlap=True)
    last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    left = left_of(m, plan)
    choose, places = chooser(ops, logits, plan, chosen, sum(left, ())), np.arange(rows, dtype=np.int32)
    on_device, on_host = list[float](), list[float]()
    for _ in range(steps + 3):
        logits.copy_(raw)
        if cuda:
            torch.cuda.synchronize()
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        begin = time.perf_counter_ns()
        choose()
        _after(m, logits, chosen, Device(unused, last, tables), plan, places, *left)
        on_host.append((time.perf_counter_ns() - begin) / 1e3)
        if cuda:
            second.record()
            second.synchronize()
            on_device.append(1e3 * first.elapsed_time(second))
    found = {"host_us": statistics.median(on_host[3:])}
    return {**found, "device_us": statistics.median(on_device[3:])} if cuda else found


def opened(folder: str, rows: int, device: str) -> Engine:
    """An engine of *rows* sequences with random weights."""
    sizes = {"max_num_seqs": rows, "max_model_len": 1536, "max_num_batched_tokens": 8192}
    kv_gib = 40.0 if device == "cuda" else 0.2
    return open_engine(folder, Settings(dummy_weights=True, device=device, kv_gib=kv_gib, seed=0, **sizes))


def engine_steps(engine: Engine, case: str, rows: int, steps: int) -> list[float]:
    """Milliseconds of each of *steps* decode steps of *rows* sequences, which are aborted then."""
    vocab = engine.machine.limits.vocab_size
    asked = [Request(tuple((31 * i + j) % vocab for j in range(128)), params(case, i, vocab)) for i in range(rows)]
    seqs = [engine.add(request) for request in asked]
    while len(engine.world.state.order) < rows or engine.world.state.cols.known[engine.world.state.order].min() < 140:
        engine.step()
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter_ns()
        engine.step()
        times.append((time.perf_counter_ns() - begin) / 1e6)
    for seq in seqs:
        engine.abort(seq)
    while engine.unfinished:
        engine.step()
    return times


def step_times(given: argparse.Namespace, device: str) -> dict[str, dict[str, float]]:
    """The median and the mean step of each case over *rounds* in turn, so that a clock which falls falls for all."""
    engine = opened(given.engine, given.rows, device)
    times: dict[str, list[float]] = {case: [] for case in STEP_CASES}
    for _ in range(given.rounds):
        for case in STEP_CASES:
            times[case] += engine_steps(engine, case, given.rows, given.steps)
    found: dict[str, dict[str, float]] = {"median": {}, "mean": {}}
    for case, each in times.items():
        found["median"][case], found["mean"][case] = statistics.median(each), statistics.mean(each)
        more = [f"{kind} {of[case]:.3f} ms ({of[case] / of['greedy'] - 1:+.1%})" for kind, of in found.items()]
        print(f"{case}: a step {', '.join(more)}", flush=True)
    return found


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="of all cases in turn, with --engine")
    parser.add_argument("--engine", help="folder with a config.json: decode steps of that model, too")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        from agentinfer.ops.triton_ops import triton_ops

        ops, name = triton_ops(device), torch.cuda.get_device_name()
    else:
        ops, name = reference(), "cpu"
    raw = 3 * torch.randn((given.rows, given.vocab), generator=torch.Generator().manual_seed(0)).to(device)
    found: dict[str, Any] = {"device": name, "rows": given.rows, "vocab": given.vocab, "after_logits": {}}
    for case in CASES:
        found["after_logits"][case] = after_logits(ops, case, raw, given.steps)
        print(case, {key: round(x, 1) for key, x in found["after_logits"][case].items()}, flush=True)
    if given.engine:
        found["engine"], found["step_ms"] = given.engine, step_times(given, device.type)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
