"""vLLM and agentinfer on the same dummy model, one after the other in one run: the issue's table of that model.

    python benchmarks/vs_vllm.py --model Qwen3-0.6B [--limit-s 590] [--json FILE] [--only decode1,mix] [--ours FLAGS]

MODEL: a folder of configs/, or a path to a folder with a config.json. Each side runs in processes of its own
(`agentinfer bench`, benchmarks/vllm_rows.py), with a tokenizer made up here, so that both turn ids into text.
Needs a GPU, and for vLLM's side vllm on the path; without it that column is empty. What has no time left is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# row -> unit, must, aim, and what vLLM 0.26 reached on an H200 when the goals were set
TABLE = {
    "Qwen3-8B": {
        "decode1": ("tok/s", 235, 270, 193),
        "decode64": ("tok/s", 11_300, 12_500, 10_218),
        "decode256": ("tok/s", 22_500, 25_500, 21_345),
        "mix": ("tok/s", 9_800, 11_500, 9_080),
        "prefill8192": ("ms", 226, 200, 226.6),
        "eager1": ("tok/s", 54, 120, 43.6),
    },
    "Qwen3-0.6B": {
        "decode1": ("tok/s", 1_250, 1_900, 465),
        "decode64": ("tok/s", 33_000, 43_000, 22_000),
        "decode256": ("tok/s", 52_000, 68_000, 37_000),
        "mix": ("tok/s", 29_000, 35_000, 23_100),
        "start": ("s", 20, 8, 70),
    },
    "DeepSeek-V2-Lite": {
        "decode1": ("tok/s", 390, 600, 294),
        "decode64": ("tok/s", 6_200, 7_750, 6_200),
        "decode256": ("tok/s", 21_400, 26_750, 21_400),
        "mix": ("tok/s", 9_860, 12_325, 9_860),
    },
}
ANY = dict.fromkeys(("decode1", "decode64", "decode256", "mix"), ("tok/s", None, None, None))
WORDS = {
    "decode1": "decode, batch 1",
    "decode64": "decode, batch 64",
    "decode256": "decode, batch 256",
    "mix": "256 requests, 100-1,024 in and out",
    "prefill8192": "prefill of 8,192 tokens",
    "eager1": "eager, batch 1",
    "start": "start to first token",
}


def model_folder(source, target):
    """*source*'s config.json, and a byte-level tokenizer of made-up words: only its speed matters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = json.loads((source / "config.json").read_text("utf-8"))
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    size = config["vocab_size"]
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    i = 0
    while len(vocab) < size - 2:
        letters = "".join(chr(97 + i // 26**place % 26) for place in range(2 + i % 4))
        vocab.setdefault(f"\u0120{letters}{i}", len(vocab))
        i += 1
    vocab |= {"<begin>": len(vocab), "<end>": len(vocab) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
    (target / "tokenizer_config.json").write_text(json.dumps({**about, "model_max_length": 131_072}))
    return target


def unit_of(row):
    return "s" if row == "start" else "ms" if row.startswith("prefill") else "tok/s"


class Runner:
    """Processes with time limits, their output in *log*. Mutable: knows how much time is left."""

    def __init__(self, limit_s, log):
        self.end = time.monotonic() + limit_s
        self.log = log

    @property
    def left(self):
        return self.end - time.monotonic()

    def __call__(self, name, limit_s, command):
        limit_s = min(limit_s, self.left)
        if limit_s < 15:
            say(f"{name}: no time left")
            return False
        begin = time.monotonic()
        with self.log.open("ab") as out:
            out.write(f"\n=== {name}: {shlex.join(command)}\n".encode())
            out.flush()
            at = out.tell()
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = f"none after {limit_s:.0f} s"
            finally:
                end_group(process)
        say(f"{name}: {time.monotonic() - begin:.0f} s, status {status}, {self.left:.0f} s left")
        if status != 0:
            with self.log.open("rb") as written:
                written.seek(at)
                print(*written.read().decode(errors="replace").splitlines()[-15:], sep="\n", flush=True)
        return status == 0


def end_group(process):
    """End *process* and all that it started: an engine left alone would keep the GPU's memory."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        time.sleep(1)
    process.wait()


def say(words):
    print(f"== {words}", flush=True)


def ours(run, folder, rows, work, more):
    """Our value of each row that could be measured, and the reports of `agentinfer bench`."""
    reports, values = {}, {}
    long = any(row.startswith("prefill") for row in rows)
    usual = ["--dummy-weights", "--max-model-len", "8448" if long else "4096", "--max-num-seqs", "256"]
    usual += ["--max-num-batched-tokens", "8192", *more]

    def bench(name, limit_s, what, *flags):
        file = work / f"{name}.json"
        command = [
            sys.executable,
            "-m",
            "agentinfer",
            "bench",
            what,
            str(folder),
            *usual,
            *flags,
            "--output",
            str(file),
        ]
        if run(f"ours, {name}", limit_s, command):
            reports[name] = json.loads(file.read_text("utf-8"))
        return reports.get(name)

    sizes = [row.removeprefix("decode") for row in rows if row.startswith("decode")]
    prompts = [row.removeprefix("prefill") for row in rows if row.startswith("prefill")]
    if sizes or prompts:
        flags = ["--batch-sizes", ",".join(sizes), "--contexts", "128", "--prefill", ",".join(prompts)]
        if found := bench("latency", 130, "latency", *flags):
            values |= {f"decode{x['batch_size']}": x["tokens_per_s"] for x in found["decode"]}
            values |= {f"prefill{x['prompt_tokens']}": x["times"]["median"] for x in found["prefill"]}
    if "mix" in rows and (found := bench("mix", 110, "throughput", "--temperature", "0.6", "--runs", "2")):
        values["mix"] = statistics.median(x["tokens_per_s"] for x in found["served"])
    if "eager1" in rows and (found := bench("eager", 70, "latency", "--eager", "--batch-sizes", "1", "--runs", "1")):
        values["eager1"] = found["decode"][0]["tokens_per_s"]
    if "start" in rows and (found := bench("start", 90, "startup")):
        values["start"] = statistics.median(x["total"] for x in found["starts_s"])
    return values, reports


def theirs(run, folder, rows, work, *, reinit, tp):
    """vLLM's value of each row that could be measured, and its lines."""
    file = work / "vllm.jsonl"
    file.touch()
    long = any(row.startswith("prefill") for row in rows)
    first = [row for row in rows if row != "eager1"]
    later = 110 if "eager1" in rows else 0

    def side(name, limit_s, wanted, *flags):
        command = [sys.executable, str(HERE / "vllm_rows.py"), str(folder), str(file), "--rows", ",".join(wanted)]
        command += ["--max-model-len", "8448" if long else "4096", *flags, *(["--reinit"] if reinit else [])]
        command += ["--tp", str(tp)]
        now = time.time()
        command += ["--started", repr(now), "--until", repr(now + min(limit_s, run.left) - 30)]
        run(f"vLLM, {name}", limit_s, command)

    if first:
        side("graphs", run.left - later, first)
    if later:
        side("eager", run.left, ["decode1"], "--eager")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    values = {}
    for line in lines:
        name = "eager1" if line["eager"] else line["row"]
        for key in ("tokens_per_s", "ms", "total"):
            if key in line:
                values[name] = line[key]
    return values, lines


def compared(table, mine, other):
    """A record a row. ratio: how many times as fast as vLLM in this run; must_ratio: what the goal was, of it."""
    rows = []
    for name, (unit, must, aim, seen) in table.items():
        faster = 1 if unit == "tok/s" else -1
        a, b = mine.get(name), other.get(name)
        rows.append(
            {
                "row": name,
                "unit": unit,
                "ours": a,
                "vllm": b,
                "ratio": None if not a or not b else (a / b) ** faster,
                "must": must,
                "aim": aim,
                "vllm_then": seen,
                "must_ratio": None if not must or not seen else (must / seen) ** faster,
                "met": None if not must or not a else (a - must) * faster >= 0,
            }
        )
    return rows


def markdown(rows):
    def number(x):
        return "-" if x is None else f"{x:,.0f}" if x >= 1_000 else f"{x:.4g}"

    yield "| row | ours | vLLM, this run | ratio | must (ratio) | aim | met |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        name = f"{WORDS.get(row['row'], row['row'])}, {row['unit']}"
        cells = (name, *(number(row[key]) for key in ("ours", "vllm", "ratio")))
        goal = f"{number(row['must'])} ({number(row['must_ratio'])})"
        met = {None: "-", True: "yes", False: "no"}[row["met"]]
        yield f"| {' | '.join(cells)} | {goal} | {number(row['aim'])} | {met} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--limit-s", type=float, default=590)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=lambda given: given.split(","), help="these rows: " + ", ".join(WORDS))
    parser.add_argument("--side", choices=("both", "ours", "vllm"), default="both")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model, on both sides")
    parser.add_argument("--ours", type=shlex.split, default=[], help="more flags for agentinfer bench")
    parser.add_argument("--log", type=Path, help="what the processes print (default: kept nowhere)")
    args = parser.parse_args()
    source = ROOT / "configs" / args.model
    source = source if source.is_dir() else Path(args.model)
    table = TABLE.get(source.name, ANY)
    if args.only:
        table = {name: table.get(name) or (unit_of(name), None, None, None) for name in args.only}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        run = Runner(args.limit_s - 5, args.log or work / "log.txt")
        folder = model_folder(source, work / source.name)
        mine, reports, other, lines = {}, {}, {}, []
        try:
            if args.side != "vllm":
                mine, reports = ours(run, folder, table, work, [*args.ours, "--tp", str(args.tp)])
            if args.side != "ours":
                other, lines = theirs(run, folder, table, work, reinit=source.name.startswith("DeepSeek"), tp=args.tp)
        finally:
            rows = compared(table, mine, other)
            if args.json:
                found = {"model": source.name, "rows": rows, "ours": reports, "vllm": lines}
                args.json.write_text(json.dumps(found), "utf-8")
            print("", f"{source.name}:", *markdown(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
