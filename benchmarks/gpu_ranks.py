"""Two GPUs of one host: sums between them by size, and the rows of models that they share.

    python benchmarks/gpu_ranks.py --json OUT.json [--only sums 8b-latency ..] [--profile 8b-eager 8b lite]

Without --only all is measured, what says most first; each row has its own limit, and what has no time left says so.
Sums are timed in a captured graph, each after the other, over inputs of 8 KB to 4 MB: by NCCL, by torch's one-shot and
two-shot over symmetric memory, by vLLM's kernel where it is installed, by ours, and by the way that the engine chooses.
Rows are `agentinfer bench` with dummy weights, beside the memory that both GPUs had taken (nvidia-smi). --profile
traces 16 steps of batch 1 on both ranks: time in sums and time busy, microseconds a step, the least of the ranks (who
comes early waits in a sum).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from acceptance_checks import least_of
from gpu_time import captured
from torch import Tensor

from agentinfer.ops.allreduce import STAGING, Fast, fast_sum, push_most, start_fast, two_shot_sum
from agentinfer.ops.comm import Processes, Pulse, connect, open_store
from agentinfer.ops.kernels import all_reduce
from agentinfer.ops.shared_memory import Shared, share_memory

ROOT = Path(__file__).parents[1]
SIZES = (8 << 10, 64 << 10, 512 << 10, 2 << 20, 4 << 20)
LATENCY = "latency --batch-sizes 1,64 --contexts 128 --prefill 1024 --max-num-batched-tokens 8192 --max-model-len 4096"
MIX = "throughput --temperature 0.6 --max-num-seqs 256 --max-num-batched-tokens 8192 --max-model-len 4096"
EAGER = "latency --batch-sizes 1 --contexts 128 --max-model-len 1024 --max-num-seqs 1 --eager --runs 1 --steps 96"
ROWS = {
    "8b-latency": ("Qwen3-8B", LATENCY, 120.0),
    "8b-eager": ("Qwen3-8B", f"{EAGER} --warmup 16 --no-prefix-cache", 90.0),
    "lite-ep": ("DeepSeek-V2-Lite", f"{LATENCY} --ep", 120.0),
    "8b-mix": ("Qwen3-8B", MIX, 150.0),
    "lite-cut": ("DeepSeek-V2-Lite", LATENCY, 120.0),
}
"""Model, flags of `agentinfer bench`, seconds that it may take."""
PROFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "8b-eager": ("Qwen3-8B", {"eager": True}),
    "8b": ("Qwen3-8B", {}),
    "lite-eager": ("DeepSeek-V2-Lite", {"ep": True, "eager": True}),
    "lite": ("DeepSeek-V2-Lite", {"ep": True}),
}
ORDER = ("8b-latency", "sums", *list(ROWS)[1:])
_SUMS_S = _PROFILE_S = 100.0


def sums_of(rank: int, size: int, port: int) -> dict[str, Any]:
    """Microseconds a sum, way by way, on this rank of *size*."""
    device = torch.device("cuda", rank)
    store = open_store("127.0.0.1", port, serve=rank == 0)
    comm = connect(store, "bench", rank, size, device, Pulse())
    fast = start_fast(comm, rank, store, "bench/fast", device)
    found: dict[str, Any] = {"ranks": size, "started": fast is not None}
    theirs: VllmSum | None = None
    if fast is not None and find_spec("vllm") is not None:
        try:
            theirs = vllm_sum(comm, rank, store, device)
        except Exception as error:  # noqa: BLE001 - the other ways are worth their time
            found["vllm"] = f"{type(error).__name__}: {error}"
    for count in SIZES:
        x = torch.zeros(count // 2, dtype=torch.bfloat16, device=device)
        ways: dict[str, Callable[[int], Any]] = {"nccl": lambda _, x=x: comm.plain_sum(x)}
        if fast is not None:
            ways |= ours(fast, x)
        if theirs is not None:
            ways["vllm"] = lambda _, x=x, theirs=theirs: theirs(x)
        for name, call in ways.items():
            found[f"{name} {count >> 10} KB"] = captured(call, 1, launches=200)
    return found


class VllmSum:
    """vLLM's own sum between GPUs that reach each other, as of 0.26. It copies its input to where the others read it,
    as it does in vLLM's graphs unless they register each buffer.
    """

    def __init__(self, ops: Any, lent: list[Shared], rank: int) -> None:
        self.ops, self.lent, (meta, buffer) = ops, lent, lent
        self.data = torch.empty(STAGING, dtype=torch.uint8, device=meta.memory.device)
        self.handle = ops.init_custom_ar(meta.pointers.tolist(), self.data, rank, fully_connected=True)
        self.place = buffer.pointers.tolist()[rank]
        ops.register_buffer(self.handle, buffer.pointers.tolist())

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.ops.all_reduce(self.handle, x, out, self.place, STAGING)
        return out


def vllm_sum(comm: Processes, rank: int, store: Any, device: torch.device) -> VllmSum:
    """That of these ranks, found right once."""
    ops = import_module("vllm._custom_ops")
    lent = share_memory(store, "bench/vllm", rank, comm.size, (ops.meta_size() + STAGING, STAGING), device)
    comm.plain_sum(torch.zeros(1, device=device))  # all have zeroed what they lend
    torch.cuda.synchronize()
    theirs = VllmSum(ops, lent, rank)
    x = torch.arange(4096, device=device, dtype=torch.bfloat16) % 15 + rank
    if not torch.equal(theirs(x), comm.plain_sum(x)):
        raise ValueError("it is wrong as it is called here")
    return theirs


def ours(fast: Fast, x: Tensor) -> dict[str, Callable[[int], Any]]:
    """The ways that need no NCCL, by name."""
    staged = fast.staging.memory[: x.numel() * x.itemsize].view(x.dtype)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    ways: dict[str, Callable[[int], Any]] = {
        "one-shot": lambda _: one_shot(staged, "sum", fast.staging.group),
        "two-shot": lambda _: two_shot_sum(fast.staging, x),
        "two-shot in place": lambda _: torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", fast.staging.group),
    }
    size = x.numel() * x.itemsize
    if size <= all_reduce.MOST:
        ways["push"] = lambda _: all_reduce.all_reduce(x, fast.lent.pointers, fast.counters, fast.rank)
    if size <= max(STAGING, push_most(fast.size)):
        ways["chosen"] = lambda _: fast_sum(fast, x)
    return ways


def sums(seconds: float) -> dict[str, Any]:
    """`sums_of` on two ranks: the slower of both counts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        each = [json.loads(rank.communicate(timeout=seconds)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # closes its pipe
    return {name: max(found[name] for found in each) if " " in name else value for name, value in each[0].items()}


def taken_mib() -> list[int]:
    """Memory taken of each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def row(name: str, seconds: float) -> dict[str, Any]:
    """What `agentinfer bench` says of row *name*, and the most memory that each GPU had taken."""
    model, flags, most_s = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        bench, *rest = flags.split()
        command = [sys.executable, "-m", "agentinfer", "bench", bench, str(ROOT / "configs" / model), "--tp", "2"]
        done = threading.Event()
        most = [0, 0]

        def watch() -> None:
            while not done.wait(1.0):
                most[:] = [max(old, new) for old, new in zip(most, taken_mib(), strict=False)]

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            subprocess.run(
                [*command, "--dummy-weights", "--output", str(out), *rest], check=True, timeout=min(seconds, most_s)
            )
        finally:
            done.set()
            watcher.join()
        return {**json.loads(out.read_text()), "memory_mib": most}


def profiled(name: str, seconds: float, tp: int = 2, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    """What traces of all ranks say of profile *name*: microseconds a step, the least of the ranks. *folder*: of another
    model; *more*: other settings.
    """
    model, changes = PROFILES[name]
    settings = {"device": "cuda", "dummy_weights": True, "max_num_seqs": 1, "max_model_len": 1024, "seed": 0}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        job: dict[str, Any] = {"folder": str(folder or ROOT / "configs" / model), "tp": tp, "out": scratch}
        job["settings"] = {**settings, "prefix_cache": False, **changes, **more}
        job["do"] = [["trace", {"prompt_tokens": 128, "steps": 16}]]
        (out / "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).with_name("acceptance_rank.py")), str(out / "job.json")]
        subprocess.run(command, check=True, timeout=min(seconds, _PROFILE_S))
        each = [json.loads((out / f"rank-{rank}.json").read_text("utf-8")) for rank in range(tp)]
    traces = [one["trace"] for one in each]
    found = {key: least_of(traces, key) for key in ("sum_us", "sums", "busy_us")}
    return {**found, "host_ms": [one["host_ms"] for one in each], "kernels": traces[0]["kernels"]}


def measured(name: str, left: float) -> dict[str, Any]:
    """`sums`, a row of ROWS, or `profile NAME`."""
    kind, _, which = name.partition(" ")
    return (
        profiled(which, left) if kind == "profile" else sums(min(left, _SUMS_S)) if name == "sums" else row(name, left)
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=ORDER, help="these, in this order (default: all, if nothing is profiled)"
    )
    parser.add_argument("--profile", nargs="+", choices=PROFILES, default=[])
    parser.add_argument("--seconds", type=float, default=560.0, help="for all (default: 560)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if args.rank is not None:
        print(json.dumps(sums_of(args.rank, 2, args.port)), flush=True)
        os._exit(0)  # whatever NCCL still waits for
    until, report = time.monotonic() + args.seconds, dict[str, Any]()
    wanted = args.only or ([] if args.profile else ORDER)
    for name in (*wanted, *(f"profile {one}" for one in args.profile)):
        left = until - time.monotonic()
        if left < 20:
            report[name] = {"error": "no time left"}
            continue
        try:
            report[name] = measured(name, left)
        except Exception as error:  # noqa: BLE001 - the other rows are worth their time
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        if args.json is not None:
            args.json.write_text(json.dumps(report))
        keys = ("decode", "prefill", "served", "memory_mib")
        shown = {key: report[name][key] for key in keys if key in report[name]} or report[name]
        print(name, json.dumps(shown)[:2000], flush=True)
    sys.exit(any("error" in found for found in report.values()))


if __name__ == "__main__":
    main()
