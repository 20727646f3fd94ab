"""One engine of several ranks, for acceptance_tp4.py: does what a job says, and writes what each rank saw.

    python benchmarks/acceptance_rank.py JOB.json

The job: `folder`, `settings`, `tp`, `out` (a folder for results) and `do`, a list of [action, arguments]. Rank 0 writes
`out/found.json`, again after each action, and every rank `out/rank-R.json` at its end: the most memory that torch had
allocated, the host's time in a step, and what a profiler's trace of some steps holds.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SUM = re.compile("all_?reduce", re.IGNORECASE)
FORBIDDEN = re.compile("^triton_[a-z]+_fused|CompiledFunction|Torch-Compiled|CompiledFx|GraphLaunch")
"""Kernels of inductor, functions of torch.compile, launches of captured graphs."""
SHOWN = 5


def trace_facts(events, steps):
    """What *events* of a trace of *steps* steps say, microseconds a step. On a CPU sums are those of gloo, and busy is
    not known.
    """
    from trace_table import KINDS, union

    timed = [e for e in events if "dur" in e]
    device = sorted((e for e in timed if e.get("cat") in KINDS), key=lambda e: e["ts"])
    sums = [e for e in device if SUM.search(e["name"])] or [e for e in timed if e["name"].startswith("gloo:all_reduce")]
    kernels: dict[str, float] = {}
    for e in device:
        kernels[e["name"]] = kernels.get(e["name"], 0.0) + e["dur"] / steps
    return {
        "steps": steps,
        "busy_us": union(device) / steps if device else None,
        "sum_us": union(sorted(sums, key=lambda e: e["ts"])) / steps,
        "sums": len(sums) / steps,
        "forbidden": sorted({e["name"] for e in timed if FORBIDDEN.search(e["name"])}),
        "events": len(timed),
        "kernels": dict(sorted(kernels.items(), key=lambda pair: -pair[1])[:20]),
    }


def on_gpu(device):
    import torch

    return device != "cpu" and torch.cuda.is_available()


def settle(device):
    """Wait for all that was launched, so that a trace holds whole steps."""
    import torch

    if on_gpu(device):
        torch.cuda.synchronize()


class Watch:
    """Stands in for `launch`, on every rank: times the host, and traces the steps that `out/trace.json` names."""

    def __init__(self, launch, out, rank, device):
        self.launch, self.out, self.rank, self.device = launch, out, rank, device
        self.times, self.left, self.profile, self.facts = [], None, None, None

    def __call__(self, m, device, plan):
        self.look(plan.step)
        begin = time.perf_counter()
        result = self.launch(m, device, plan)
        if len(plan.slots) == len(plan.rows):
            self.times.append(time.perf_counter() - begin)
        return result

    def look(self, step):
        """Begin or end a trace before *step*. The first of several ranges only warms the profiler up."""
        if self.left is None and (self.out / "trace.json").exists():
            self.left = json.loads((self.out / "trace.json").read_text())
        if not self.left:
            return
        first, count = self.left[0]
        if step == first:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu(self.device) else [])]
            settle(self.device)
            self.profile = profile(activities=kinds)
            self.profile.start()
        elif step == first + count and self.profile is not None:
            self.end(count)

    def end(self, count):
        settle(self.device)
        self.profile.stop()
        self.left = self.left[1:]
        if not self.left:
            file = self.out / f"trace-{self.rank}.json"
            self.profile.export_chrome_trace(str(file))
            self.facts = trace_facts(json.loads(file.read_text("utf-8"))["traceEvents"], count)
        self.profile = None

    def report(self):
        """Write what this rank saw."""
        import torch

        found = {"rank": self.rank, "trace": self.facts}
        if self.times:
            found["host_ms"] = statistics.median(self.times[len(self.times) // 4 :]) * 1e3
        if on_gpu(self.device):
            found["peak_allocated"] = torch.cuda.max_memory_allocated()
            found["peak_reserved"] = torch.cuda.max_memory_reserved()
        (self.out / f"rank-{self.rank}.json").write_text(json.dumps(found))


def traced(engine, out, prompt_tokens, steps):
    """Have all ranks trace *steps* decode steps of one sequence."""
    from agentinfer.loop import run
    from agentinfer.state.request import Request, SamplingParams

    warm, lead = 3, 8
    tokens = lead + warm + steps + 12
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    size = engine.machine.limits.vocab_size
    seq = engine.add(Request(tuple((7 * i + 1) % size for i in range(prompt_tokens)), params))
    for _ in range(lead):
        engine.step()
    first = engine.world.state.step + 2
    file = out / "trace.json.part"
    file.write_text(json.dumps([[first, warm], [first + warm + 2, steps]]))
    file.rename(out / "trace.json")  # whole, or not there
    list(run(engine, [seq]))
    return {"first": first + warm + 2, "steps": steps}


def answers(engine, prompts, tokens):
    """What *prompts*, texts or ids, are answered greedily."""
    from agentinfer.loop import generate
    from agentinfer.state.request import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    results = generate(engine, prompts, params, progress=False)
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(failed[0])
    return [{"prompt_ids": list(r.prompt_ids), "output_ids": list(r.output_ids), "text": r.text} for r in results]


def choices(engine, sequences):
    """The likeliest token of each place of *sequences* but the first, and how far behind the next one is."""
    from agentinfer.scoring import score

    return [
        {"likeliest": one.top_ids[:, 0].tolist(), "margin": (one.top_logprobs[:, 0] - one.top_logprobs[:, 1]).tolist()}
        for one in score(engine, sequences, top=2)
    ]


def act(engine, out, what, given):
    import attrs

    from agentinfer.bench.measure import decode

    match what:
        case "decode":
            found = attrs.asdict(decode(engine, 1, **given))
            del found["steps"]["each"]
            return found
        case "trace":
            return traced(engine, out, **given)
        case "answers":
            return answers(engine, **given)
        case "choices":
            return choices(engine, **given)
    raise ValueError(what)


def facts_of(engine):
    m = engine.machine
    cpu = m.ranks.device.type == "cpu"
    return {
        "model": m.model.name,
        "layers": len(engine.world.device.kv.layers),
        "dtype": str(m.model.dtype).removeprefix("torch."),
        "ops": m.ops.name,
        "device": "cpu" if cpu else "cuda",
        "sums": "no GPU" if cpu else "one rank" if m.ranks.tp.size == 1 else way(m.ranks.tp.comm),
    }


def way(comm):
    return "NCCL alone" if comm.fast is None else "own kernels"


def child(out, device):
    """The main function of a rank that is not 0: agentinfer's own, watched."""
    from agentinfer import lead, ranks

    follow = ranks.follow

    def watched(m, *args, **more):
        watch = lead.launch = Watch(lead.launch, Path(out), m.ranks.tp.rank, device)
        state = follow(m, *args, **more)
        watch.report()
        return state

    ranks.follow = watched
    ranks.child()


def main():
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    out, device = Path(job["out"]), job["settings"]["device"]
    from agentinfer import ranks, turn
    from agentinfer.build import Settings

    ranks._CHILD = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import acceptance_rank; "
        f"acceptance_rank.child({str(out)!r}, {device!r})"
    )
    watch = turn.launch = Watch(turn.launch, out, 0, device)
    begin = time.perf_counter()
    with ranks.open_ranks(job["folder"], Settings(**job["settings"]), job["tp"]) as engine:
        found = {"ready_s": time.perf_counter() - begin, **facts_of(engine)}
        for what, given in job["do"]:
            found[what] = act(engine, out, what, given)
            (out / "found.json").write_text(json.dumps(found))
        watch.report()


if __name__ == "__main__":
    main()
