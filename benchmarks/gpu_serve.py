"""`agentinfer serve` in one process and in two: tokens a second beside the offline loop, and gaps beside long prompts.

    python benchmarks/gpu_serve.py [FOLDER] --json OUT.json [--seconds 150] [--only offline one two] [--rounds 2]

FOLDER (configs/Qwen3-0.6B) need only have a config.json: prompts and answers are token ids. Each way of serving is a
server of its own, asked by clients in processes of their own:

* mix: the requests of `agentinfer bench throughput`, all at once, against what that command itself says here;
* alone: streams that nothing disturbs; beside: the same streams while other clients send long prompts in a loop. What
  counts is the time between two events of a stream, as its client sees it.

Every answer must have as many tokens as were asked for. What --seconds leaves no time for is left out, and named. The
processor time of the server's main thread (HTTP, in one process), of its other threads (the engine) and of its child
(HTTP, in two) is told by part. --tiny rehearses all of it on a CPU, with a tiny model and small sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import attrs
from attrs import evolve, frozen

from agentinfer.bench.load import Answer, Load, Sent, ask, measure, spread, summary
from agentinfer.sse import Remote, get

ROOT = Path(__file__).parents[1]
NAME = "measured"
TEMPERATURE = 0.6
WAYS = {"one": ("--no-http-process",), "two": ("--http-process",)}
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER, as linux/prctl.h has it."""


@frozen
class Sizes:
    requests: int = 256
    prompt_tokens: tuple[int, int] = (100, 1024)
    output_tokens: tuple[int, int] = (100, 1024)
    max_model_len: int = 16384
    max_num_batched_tokens: int = 8192
    streams: int = 64
    stream_prompt: int = 128
    stream_tokens: int = 200
    prompters: int = 16
    long_prompt: int = 8000
    least_s: float = 20.0
    """Less time than this is not enough for a part."""


TINY = Sizes(12, (4, 16), (4, 16), 256, 64, 4, 8, 40, 2, 200, 5.0)


# --- processes -------------------------------------------------------------------------------------------------------


def descendants(root):
    """The processes below *root*, by number."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {root}


def end_all():
    """Kill whatever was started here, directly or not: orphans are this process's children (`adopt`)."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def adopt():
    """Become the parent of orphans below, and end with everything below when SIGTERM comes."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)

    def ended(_number, _frame):
        end_all()
        sys.exit(143)

    signal.signal(signal.SIGTERM, ended)


@contextlib.contextmanager
def within(seconds):
    """What the block has started and still runs after *seconds* is killed, which fails the block."""
    timer = threading.Timer(seconds, end_all)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cpu_s(pid):
    """Processor seconds of a server so far: its main thread, its other threads, its child processes."""
    tick, found = os.sysconf("SC_CLK_TCK"), {"main": 0.0, "threads": 0.0, "child": 0.0}

    def of(stat):
        words = stat.read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / tick

    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            found["main" if task.name == str(pid) else "threads"] += of(task / "stat")
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            found["child"] += of(Path(f"/proc/{child}/stat"))
    return found


def flags(sizes):
    """Of the engine, for the server and for the offline loop."""
    pairs = {
        "--max-num-seqs": max(sizes.requests, sizes.streams + sizes.prompters),
        "--max-num-batched-tokens": sizes.max_num_batched_tokens,
        "--max-model-len": sizes.max_model_len,
    }
    return ["--dummy-weights", *(str(word) for pair in pairs.items() for word in pair)]


@contextlib.contextmanager
def server(folder, sizes, extra):
    """A server of its own: how to reach it, and its process. It must end well when told to."""
    command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", "0", "--served-model-name", NAME]
    process = subprocess.Popen([*command, *flags(sizes), *extra], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("serving "):
            raise RuntimeError(f"the server did not start: {line!r}")
        yield Remote(line.split()[-1]), process.pid
        process.terminate()
        status = process.wait(20)
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}")
    finally:
        process.kill()
        process.wait()


# --- the parts -------------------------------------------------------------------------------------------------------


def offline(folder, sizes, vocab_size, rounds):
    """What `agentinfer bench throughput` says of the same requests and settings."""
    spans = {"--prompt-tokens": sizes.prompt_tokens, "--output-tokens": sizes.output_tokens}
    asked = [word for name, span in spans.items() for word in (name, "{}-{}".format(*span))]
    asked += ["--requests", str(sizes.requests), "--temperature", str(TEMPERATURE), "--runs", str(rounds)]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "bench.json"
        command = [sys.executable, "-m", "agentinfer", "bench", "throughput", str(folder), *flags(sizes), *asked]
        subprocess.run([*command, "--output", str(out)], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    wanted = sum(job.output_tokens for job in mix_jobs(sizes, vocab_size, 0))
    for run in found["served"]:
        if run["output_tokens"] != wanted:
            raise RuntimeError(f"offline: {run['output_tokens']} tokens instead of {wanted}")
        for times in (run["steps"], run["first_token"]):
            del times["each"]
    return {**found, "tok_s": [run["tokens_per_s"] for run in found["served"]]}


def mix_jobs(sizes, vocab_size, run):
    """The requests that the offline loop's run *run* serves."""
    from agentinfer.bench.measure import Mix, requests_of

    wanted = Mix(sizes.requests, sizes.prompt_tokens, sizes.output_tokens, TEMPERATURE)
    return [Sent(0.0, one.prompt, one.params.max_tokens) for one in requests_of(wanted, vocab_size, run)]


def sent(remote, jobs, clients, name):
    """Send *jobs* at once from *clients* processes; what came of them."""
    load = Load(requests=len(jobs), concurrency=len(jobs), temperature=TEMPERATURE, processes=clients)
    answers = measure(remote, NAME, load, jobs)
    check(name, jobs, answers)
    return {**summary(load, answers), "clients": clients}


def check(name, jobs, answers):
    """Raises RuntimeError unless each of *jobs* was answered, in full."""
    wrong = [
        one.error or f"{one.output_tokens} tokens instead of {job.output_tokens}"
        for job, one in zip(jobs, answers, strict=True)
        if one.error is not None or one.output_tokens != job.output_tokens
    ]
    if wrong:
        raise RuntimeError(f"{name}: {len(wrong)} of {len(jobs)} requests failed: {wrong[0]}")


def stream_jobs(sizes, vocab_size, seed):
    """Streams of one length each, whose prompts nobody else has."""
    draw = random.Random(f"streams {seed}")
    prompts = [tuple(draw.randrange(vocab_size) for _ in range(sizes.stream_prompt)) for _ in range(sizes.streams)]
    return [Sent(0.0, prompt, sizes.stream_tokens) for prompt in prompts]


def beside(remote, jobs, sizes, vocab_size, clients):
    """Send *jobs* while prompters do what they do; what came of both."""
    share = max(1, sizes.prompters // 8)  # clients of long prompts to a process: eight processes at most
    given = {"url": remote.url, "length": sizes.long_prompt, "vocab_size": vocab_size, "count": share}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--prompter", json.dumps({**given, "seed": first})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in range(0, sizes.prompters, share)
    ]  # fmt: skip
    try:
        found = sent(remote, jobs, clients, "beside")
        each = [json.loads(process.communicate()[0]) for process in processes]  # the end of its input ends each
    finally:
        for process in processes:
            process.kill()
            process.wait()
    prompts = [Answer(**one) for said in each for one in said]
    long = Sent(0.0, (0,) * sizes.long_prompt, 1)
    check("long prompts", [long] * len(prompts), prompts)
    if not prompts:
        raise RuntimeError("long prompts: none was sent")
    begin, end = min(one.sent_s for one in prompts), max(one.sent_s + one.last_s for one in prompts)
    answered = {"sent": len(prompts), "per_s": len(prompts) / (end - begin), "processes": len(processes)}
    return {**found, "long_prompts": {**answered, "ttft_ms": spread(one.first_s for one in prompts)}}


def prompter(given):
    """The main function of a process that sends long prompts, until its standard input ends."""

    async def work():
        ending = asyncio.Event()
        loop, start = asyncio.get_running_loop(), 0.0
        reading = loop.run_in_executor(None, sys.stdin.read)
        reading.add_done_callback(lambda _: ending.set())
        remote, load = Remote(given["url"]), Load(temperature=TEMPERATURE)

        async def one(seed):
            draw, answers = random.Random(f"prompter {seed}"), []
            while not ending.is_set():
                prompt = tuple(draw.choices(range(given["vocab_size"]), k=given["length"]))
                answers.append(await ask(remote, NAME, load, Sent(0.0, prompt, 1), start))
                if answers[-1].error is not None:
                    break
            return answers

        return await asyncio.gather(*(one(given["seed"] + i) for i in range(given["count"])))

    answers = [attrs.asdict(one) for said in asyncio.run(work()) for one in said]
    sys.stdout.write(json.dumps(answers))


def ways_parts(remote, pid, sizes, vocab_size, clients, rounds):
    """The parts of one way of serving, in their order: names, and what measures them."""
    warm = [evolve(job, output_tokens=min(job.output_tokens, 64)) for job in mix_jobs(sizes, vocab_size, rounds)]
    few = max(1, clients // 2)

    def used(work):
        before = cpu_s(pid)
        found = work()
        return {**found, "cpu_s": {name: round(after - before[name], 2) for name, after in cpu_s(pid).items()}}

    def mix():
        sent(remote, warm, clients, "warm-up")
        runs = [used(lambda i=i: sent(remote, mix_jobs(sizes, vocab_size, i), clients, "mix")) for i in range(rounds)]
        return {"runs": runs, "tok_s": [run["output_tokens_per_s"] for run in runs]}

    yield "mix", mix
    yield "alone", lambda: used(lambda: sent(remote, stream_jobs(sizes, vocab_size, 0), few, "alone"))
    yield "beside", lambda: used(lambda: beside(remote, stream_jobs(sizes, vocab_size, 1), sizes, vocab_size, few))


# --- all of it -------------------------------------------------------------------------------------------------------


def run_way(way, folder, sizes, vocab_size, args, left, report):
    """Serve in one *way*, and fill in *report* part by part."""
    found = report[way] = {}
    began = time.monotonic()
    with server(folder, sizes, WAYS[way]) as (remote, pid):
        found["start_s"] = round(time.monotonic() - began, 2)
        for name, part in ways_parts(remote, pid, sizes, vocab_size, args.clients, args.rounds):
            if left() < sizes.least_s:
                report["left_out"].append(f"{way}: {name}")
                continue
            found[name] = part()
            print("\n".join(rows(way, name, found[name])), flush=True)
        found["load_after"] = asyncio.run(get(remote, "/load"))


def rows(way, name, found):
    """What a person reads of one part."""
    where = f"{way:<8}{name:<8}"
    if name == "offline":
        yield f"{where}{', '.join(f'{x:,.0f}' for x in found['tok_s'])} output tok/s"
        return
    for run in found.get("runs", [found]):
        gap, cpu, first = run["itl_ms"], run["cpu_s"], run["ttft_ms"]["p50"]
        yield (
            f"{where}{run['output_tokens_per_s']:,.0f} output tok/s in {run['duration_s']:.2f} s; "
            f"TTFT p50 {first:.1f} ms; gaps p50 {gap['p50']:.2f}, p99 {gap['p99']:.2f}, max {gap['max']:.1f} ms; "
            f"processor s: main {cpu['main']}, threads {cpu['threads']}, child {cpu['child']}; {run['clients']} clients"
        )
    if name == "beside":
        long = found["long_prompts"]
        yield f"{where}{long['sent']} long prompts, {long['per_s']:.1f}/s, TTFT p50 {long['ttft_ms']['p50']:.1f} ms"


def ratios(report):
    """Output tokens a second over HTTP, of the offline loop's, by way: of the medians."""
    base = report.get("offline", {}).get("tok_s")
    served = {way: report.get(way, {}).get("mix", {}).get("tok_s") for way in WAYS}
    return {
        way: round(statistics.median(found) / statistics.median(base), 4)
        for way, found in served.items()
        if found and base
    }


def work(folder, sizes, args, until, report):
    """Every part that there is time for. What fails is in *report*, and the next part goes on."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]

    def left():
        return until - time.monotonic()

    for name in args.only:
        if left() < sizes.least_s:
            report["left_out"].append(name)
            continue
        try:
            with within(left()):
                if name == "offline":
                    report[name] = offline(folder, sizes, vocab_size, args.rounds)
                    print("\n".join(rows("", name, report[name])), flush=True)
                else:
                    run_way(name, folder, sizes, vocab_size, args, left, report)
        except Exception as error:  # noqa: BLE001 - the other parts are worth their time
            report["errors"].append(f"{name}: {type(error).__name__}: {error}")
        report["http_of_offline"] = ratios(report)
        write(args.json, report)


def write(path, report):
    if path is not None:
        path.write_text(json.dumps(report) + "\n")


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "configs" / "Qwen3-0.6B")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="for all (default: 150)")
    parser.add_argument("--only", nargs="+", choices=("offline", *WAYS), default=["offline", *WAYS])
    parser.add_argument("--rounds", type=int, default=2, help="of mix (default: 2)")
    parser.add_argument("--clients", type=int, default=8, help="processes of clients; half for streams (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small sizes")
    parser.add_argument("--prompter", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv=None):
    """0; 1 if anything failed or was left out."""
    args = arguments(argv)
    if args.prompter is not None:
        prompter(args.prompter)
        return 0
    until, sizes = time.monotonic() + args.seconds, TINY if args.tiny else Sizes()
    report = {"sizes": attrs.asdict(sizes), "clients": args.clients, "rounds": args.rounds}
    report |= {"temperature": TEMPERATURE, "http_of_offline": {}, "errors": [], "left_out": []}
    adopt()
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = args.folder
            if args.tiny:
                sys.path.insert(0, str(ROOT / "tests"))
                from tiny import write_tiny

                folder = write_tiny(Path(place) / "tiny")
            work(folder, sizes, args, until, report)
    finally:
        end_all()
        write(args.json, report)
    print("HTTP of offline:", json.dumps(report["http_of_offline"]))
    for name in ("left_out", "errors"):
        for said in report[name]:
            print(f"{name}: {said}", flush=True)
    return int(bool(report["errors"] or report["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
