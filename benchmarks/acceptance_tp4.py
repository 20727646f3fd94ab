"""Acceptance of an engine of several GPUs, in one run: speed, traces, memory, equal choices, HTTP; each bound judged.

    python benchmarks/acceptance_tp4.py [--tp 4] [--model configs/Qwen3-8B] [--json OUT] [--seconds 570] [--only ..]

The bounds are those of Qwen3-8B over four H200; with --tp 2 it can be rehearsed on two, and with --device cpu and tiny
models (--model, --lite: folders) anywhere, over gloo. Weights are dummies where a folder has none. Each part is
processes of its own with a time limit of its own; a part for which no time is left is left out, and says so. Exit
status: 1 if a part failed, was left out, or missed a bound.

  eager    batch 1 without graphs: tokens/s; from a trace of each rank busy time, sums, and nothing compiled; memory
  graphs   batch 1 with graphs: tokens/s; memory
  choices  greedy answers, teacher-forced on one rank: equal choices wherever its margin is clear. Of dummy weights each
           rank draws its own part, so without real ones this is a model of the same widths, a few layers, written here
  lite     a model of experts spread over the ranks (--ep): memory, and how many sums a step has
  http     `agentinfer serve`, 50 requests at rate 1, one at a time, by `agentinfer bench serve`
  load     batch 64, and 256 requests of 100 to 1,024 tokens in and out, by `agentinfer bench`
  vllm     the same two rows and batch 1 by vLLM, where it is installed
  real     with real weights: an answer in words, and transformers' choices beside it
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from acceptance_checks import MARGIN, compared, judged, table
from attrs import asdict, frozen
from vs_vllm import Runner, end_group, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = {"eager": 110, "graphs": 100, "choices": 70, "lite": 90, "http": 150, "load": 150, "vllm": 200, "real": 150}
"""Seconds that each may take."""
LEAST_S = 15.0
"""Less is not enough for a part."""
QUESTION = "苏州园林的特点是"


@frozen
class Sizes:
    prompt: int = 128
    steps: int = 192
    warmup: int = 32
    traced: int = 16
    layers: int = 4
    answers: int = 8
    answer_tokens: int = 64
    max_model_len: int = 1024
    load_len: int = 4096
    batch: int = 64
    requests: int = 256
    lengths: str = "100-1024"
    http_requests: int = 50
    http_rate: float = 1.0
    http_lengths: tuple[str, str] = ("100-300", "128-128")
    longest_start_s: float = 100.0


TINY = Sizes(16, 12, 2, 4, 2, 3, 12, 128, 128, 4, 6, "4-16", 4, 4.0, ("4-8", "8-8"), 60.0)


# --- parts -----------------------------------------------------------------------------------------------------------


class Leave(Exception):
    """A part that is left out, and why."""


class EndedEarly(Exception):
    """A part whose processes failed or ran out of time, and what it had found by then."""

    def __init__(self, had):
        super().__init__(f"it had {', '.join(had) or 'found nothing'} (see the log)")
        self.had = had


@contextlib.contextmanager
def utilisation(count):
    """The highest utilisation of each of *count* GPUs while the block runs, in percent; empty where nobody says."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    most, over = [], threading.Event()

    def watch():
        while not over.wait(1.0):
            try:
                said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split()
            except (OSError, subprocess.SubprocessError):
                return
            now = [float(word) for word in said[:count]]
            most[:] = [max(pair) for pair in zip(most or now, now, strict=True)]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


class Acceptance:
    """The parts. Mutable: the time that is left, and speeds to hold beside vLLM's."""

    def __init__(self, args, work, log):
        self.args, self.work, self.sizes = args, work, TINY if args.device == "cpu" else Sizes()
        self.run = Runner(args.seconds, log)
        self.speeds = {}

    def part(self, name):
        """What part *name* found. Raises Leave, and whatever went wrong."""
        if self.run.left < LEAST_S:
            raise Leave("no time is left")
        return getattr(self, name)()

    def settings(self, **more):
        folder = Path(more.pop("folder", self.args.model))
        few = {"device": self.args.device, "max_num_seqs": 1, "max_model_len": self.sizes.max_model_len, "seed": 0}
        return {"dummy_weights": not weighty(folder), "prefix_cache": False, **few, **more}

    def ranks(self, name, do, tp=None, folder=None, **settings):
        """What acceptance_rank.py found, with the report of each rank and the use of each GPU."""
        tp, out, folder = tp or self.args.tp, self.work / name, folder or self.args.model
        out.mkdir()
        job = {"folder": str(folder), "tp": tp, "out": str(out), "do": do}
        job["settings"] = self.settings(folder=folder, **settings)
        (out / "job.json").write_text(json.dumps(job))
        with utilisation(tp) as seen:
            good = self.run(
                name,
                PARTS[name.partition("-")[0]],
                [sys.executable, str(HERE / "acceptance_rank.py"), str(out / "job.json")],
            )
        file = out / "found.json"
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if not good or any(what not in found for what, _ in do):
            raise EndedEarly(found)
        reports = [json.loads((out / f"rank-{rank}.json").read_text("utf-8")) for rank in range(tp)]
        return {**found, "ranks": reports, "utilisation": seen, "settings": job["settings"]}

    def timing(self):
        sizes = self.sizes
        return ["decode", {"prompt_tokens": sizes.prompt, "steps": sizes.steps, "warmup": sizes.warmup, "runs": 2}]

    def trace(self):
        return ["trace", {"prompt_tokens": self.sizes.prompt, "steps": self.sizes.traced}]

    def eager(self):
        return self.ranks("eager", [self.timing(), self.trace()], eager=True)

    def graphs(self):
        found = self.ranks("graphs", [self.timing()])
        self.speeds["decode1"] = found["decode"]["tokens_per_s"]
        return found

    def choices(self):
        folder = self.args.model
        if not weighty(folder):
            folder = self.work / "written"
            command = [sys.executable, "-c", WRITE, str(self.args.model), str(folder), str(self.sizes.layers)]
            if not self.run("choices-write", PARTS["choices"], [*command, self.args.device]):
                raise RuntimeError("no checkpoint was written (see the log)")
        size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
        prompts = [[(37 * i + 11 * j) % min(size, 10_000) for j in range(8 + 9 * i)] for i in range(self.sizes.answers)]
        asked = {"prompts": prompts, "tokens": self.sizes.answer_tokens}
        ours = self.ranks("choices-all", [["answers", asked]], folder=folder)["answers"]
        whole = [one["prompt_ids"] + one["output_ids"] for one in ours]
        found = self.ranks("choices-one", [["choices", {"sequences": whole}]], tp=1, folder=folder)
        return {**compared(ours, found["choices"], MARGIN[found["dtype"]]), "dtype": found["dtype"]}

    def lite(self):
        if not (Path(self.args.lite) / "config.json").is_file():
            raise Leave(f"{self.args.lite}: no config.json")
        return self.ranks("lite", [self.timing(), self.trace()], folder=self.args.lite, ep=True, eager=True)

    def flags(self, length):
        flags = ["--device", self.args.device, "--tp", str(self.args.tp), "--max-model-len", str(length)]
        return [*flags, *([] if weighty(self.args.model) else ["--dummy-weights"])]

    def http(self):
        sizes, port, begin = self.sizes, free_port(), time.monotonic()
        most = min(PARTS["http"], self.run.left)
        command = [sys.executable, "-m", "agentinfer", "serve", str(self.args.model), "--port", str(port)]
        command += ["--max-num-seqs", "8", *self.flags(sizes.max_model_len)]
        with self.run.log.open("ab") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            await_health(server, port, min(most, sizes.longest_start_s))
            ready_s = time.monotonic() - begin
            prompts, outputs = sizes.http_lengths
            ids = ["--token-ids", "1-90"] if self.args.device == "cpu" else []
            found = self.bench(
                "http", most - ready_s, "serve", "--url", f"http://127.0.0.1:{port}", "--requests",
                str(sizes.http_requests), "--rate", str(sizes.http_rate), "--concurrency", "1", "--warmup", "2",
                "--prompt-tokens", prompts, "--output-tokens", outputs, *ids,
            )  # fmt: skip
        finally:
            end_group(server)
        return {**found, "ready_s": ready_s}

    def load(self):
        sizes, flags, found = self.sizes, self.flags(self.sizes.load_len), {}
        tokens = ["--max-num-batched-tokens", "8192"]
        batch = ["--batch-sizes", str(sizes.batch), "--contexts", str(sizes.prompt), "--prefill", "", "--runs", "2"]
        batch += ["--steps", str(sizes.steps), "--warmup", str(sizes.warmup), "--max-num-seqs", str(sizes.batch)]
        file = str(self.args.model)
        row = self.bench("batch", PARTS["load"] / 2, "latency", file, *batch, *flags, *tokens)
        found["batch"] = row["decode"][0]["tokens_per_s"]
        mix = ["--requests", str(sizes.requests), "--prompt-tokens", sizes.lengths, "--output-tokens", sizes.lengths]
        mix += ["--temperature", "0.6", "--max-num-seqs", str(sizes.requests)]
        row = self.bench("mix", PARTS["load"] / 2, "throughput", file, *mix, *flags, *tokens)
        self.speeds |= {"decode64": found["batch"], "mix": row["served"][0]["tokens_per_s"]}
        return {**found, "mix": self.speeds["mix"]}

    def bench(self, name, limit_s, what, *given):
        file = self.work / f"bench-{name}.json"
        command = [sys.executable, "-m", "agentinfer", "bench", what, *given, "--output", str(file)]
        if not self.run(name, limit_s, command):
            raise RuntimeError(f"agentinfer bench {what} failed (see the log)")
        return json.loads(file.read_text("utf-8"))

    def vllm(self):
        if self.args.device == "cpu" or importlib.util.find_spec("vllm") is None:
            raise Leave("vLLM is not installed" if self.args.device != "cpu" else "it needs GPUs")
        file = self.work / "vllm.json"
        limit = min(PARTS["vllm"], self.run.left) - 5
        command = [sys.executable, str(HERE / "vs_vllm.py"), "--model", str(self.args.model), "--tp", str(self.args.tp)]
        command += ["--side", "vllm", "--only", "decode1,decode64,mix", "--limit-s", str(limit), "--json", str(file)]
        if not self.run("vllm", limit + 5, command):
            raise RuntimeError("vs_vllm.py failed (see the log)")
        rows = [row for row in json.loads(file.read_text("utf-8"))["rows"] if row["vllm"]]
        if not rows:
            raise RuntimeError("vLLM measured nothing (see the log)")
        return {"rows": {row["row"]: [row["vllm"], self.speeds.get(row["row"])] for row in rows}}

    def real(self):
        folder = Path(self.args.model)
        if not weighty(folder) or not (folder / "tokenizer.json").is_file():
            raise Leave("the weights are dummies: no answer of theirs says anything")
        ours = self.ranks("real", [["answers", {"prompts": [QUESTION], "tokens": 24}]])
        (one,) = ours["answers"]
        found = {"text": one["text"], "tokens": len(one["output_ids"]), "dtype": ours["dtype"]}
        if importlib.util.find_spec("transformers") is None:
            return {**found, "transformers": "not installed"}
        file = self.work / "transformers.json"
        job = {"folder": str(folder), "ids": one["prompt_ids"] + one["output_ids"], "dtype": ours["dtype"]}
        job |= {"out": str(file), "device": "cpu" if ours["device"] == "cpu" else "cuda"}
        if not self.run("transformers", PARTS["real"], [sys.executable, "-c", THEIRS, json.dumps(job)]):
            raise RuntimeError("transformers failed (see the log)")
        theirs = json.loads(file.read_text("utf-8"))
        return {**found, **compared([one], [theirs], MARGIN[ours["dtype"]]), "transformers": theirs["version"]}


WRITE = """
import json, pathlib, sys, torch
from agentinfer.models.model import read_config
from agentinfer.models.weights import tree_leaves
from safetensors.torch import save_file
source, target, layers, device = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = json.loads((source / "config.json").read_text("utf-8"))
target.mkdir()
layers = min(layers, config["num_hidden_layers"])
(target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
model = read_config(target)
draw = torch.Generator(device).manual_seed(0)
tensors = {}
for spec in (spec for leaf in tree_leaves(model.packed) for spec in leaf.parts):
    norm = spec.kind == "norm"
    x = torch.ones(spec.shape) if norm else torch.randn(spec.shape, generator=draw, device=device) * 0.02
    tensors[spec.name] = x.to("cpu", model.dtype or torch.float32)
save_file(tensors, target / "model.safetensors")
"""


THEIRS = """
import json, sys, torch, transformers
job = json.loads(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=getattr(torch, job["dtype"]))
with torch.inference_mode():
    logits = model.to(job["device"])(torch.tensor([job["ids"]], device=job["device"])).logits[0].float()
best = logits.topk(2)
found = {"likeliest": best.indices[:-1, 0].tolist(), "margin": (best.values[:-1, 0] - best.values[:-1, 1]).tolist()}
with open(job["out"], "w") as file:
    json.dump({**found, "version": transformers.__version__}, file)
"""


def weighty(folder):
    """Whether *folder* has weights."""
    return any(Path(folder).glob("*.safetensors"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def await_health(server, port, within_s):
    """Return when the server answers. Raises RuntimeError if it ends, or does not within *within_s*."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"agentinfer serve ended with status {server.returncode} (see the log)")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"agentinfer serve did not answer within {within_s:.0f} s (see the log)")


# --- all of it -------------------------------------------------------------------------------------------------------


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "Qwen3-8B")
    parser.add_argument("--lite", type=Path, default=ROOT / "configs" / "DeepSeek-V2-Lite")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all (default: 570)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="what the processes print (default: kept nowhere)")
    args = parser.parse_args(given)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model}: no config.json")
    return args


def all_parts(acceptance, names, write=lambda _report: None):
    """What each part of *names* found, or why it did not; *write* is called with all of it after each."""
    report = {}
    for name in names:
        begin = time.monotonic()
        try:
            report[name] = acceptance.part(name)
        except Leave as why:
            report[name] = {"left_out": str(why)}
        except EndedEarly as error:
            report[name] = {"error": f"it ended early; {error}", "had": error.had}
        except Exception as error:  # noqa: BLE001 - the other parts are worth their time
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        report[name]["took_s"] = round(time.monotonic() - begin, 1)
        write(report)
    return report


def main():
    args = arguments()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)

        def write(report):
            if args.json is not None:
                checks = [{**asdict(one), "met": one.met} for one in judged(report)[0]]
                facts = {"model": str(args.model), "tp": args.tp, "device": args.device}
                args.json.write_text(json.dumps({**facts, "checks": checks, "parts": report}), "utf-8")

        report = all_parts(Acceptance(args, work, args.log or work / "log.txt"), args.only, write)
    checks, without = judged(report)
    say(f"{args.model.name} over {args.tp} ranks; the bounds are those of Qwen3-8B over 4 H200")
    print(*table(checks), *without, sep="\n", flush=True)
    sys.exit(any(one.met is False for one in checks) or bool(without))


if __name__ == "__main__":
    main()
