"""benchmarks/acceptance_tp4.py: its bounds, what it reads in traces, what it does with parts; and all of it, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepseeks
import tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "acceptance_tp4.py"
sys.path.insert(0, str(SCRIPT.parent))
import acceptance_checks as checks  # noqa: E402 - scripts, found by the line above
import acceptance_rank as rank  # noqa: E402
import acceptance_tp4 as acceptance  # noqa: E402
import vs_vllm  # noqa: E402


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


def test_a_trace_says_busy_time_sums_and_what_must_not_be_there() -> None:
    """Overlapping kernels count once; sums are those of every way; names that only look alike are no fault."""
    events = [
        event("gemv", 0.0, 10.0), event("_all_reduce", 5.0, 10.0), event("ncclDevKernel_AllReduce_Sum_bf16", 20.0, 4.0),
        event("two_shot_all_reduce_kernel", 30.0, 2.0), event("ncclDevKernel_AllGather_RING_LL", 40.0, 4.0),
        event("Memcpy HtoD", 50.0, 1.0, "gpu_memcpy"), event("cudaLaunchKernel", 0.0, 90.0, "cuda_runtime"),
        event("nccl:all_reduce", 20.0, 9.0, "gpu_user_annotation"), {"name": "no time", "cat": "kernel", "ts": 3.0},
    ]  # fmt: skip
    found = rank.trace_facts(events, 2)
    assert (found["busy_us"], found["sum_us"], found["sums"]) == (13.0, 8.0, 1.5)
    assert found["forbidden"] == []
    for name in ("triton_poi_fused_add_0", "CompiledFunction", "Torch-Compiled Region: 0/0", "cudaGraphLaunch"):
        assert rank.trace_facts([*events, event(name, 60.0, 1.0, "cpu_op")], 2)["forbidden"] == [name]
    on_host = rank.trace_facts([event("gloo:all_reduce", i * 10.0, 3.0, "user_annotation") for i in range(6)], 2)
    assert (on_host["busy_us"], on_host["sum_us"], on_host["sums"]) == (None, 9.0, 3.0)


def test_a_bound_is_met_missed_or_not_measured() -> None:
    """By how much; at the bound itself it is met."""
    for value, least, verdict in (
        (60.0, True, "met by 6 (11%)"), (54.0, True, "met by 0 (0%)"), (27.0, True, "MISSED by 27 (50%)"),
        (27.0, False, "met by 27 (50%)"), (81.0, False, "MISSED by 27 (50%)"), (None, False, "not measured"),
    ):  # fmt: skip
        one = checks.Check("eager", "batch 1", value, "tok/s", 54, least=least)
        assert one.verdict == verdict
        assert one.met is (None if value is None else verdict.startswith("met"))
    assert checks.Check("http", "output", 5.0, "tok/s", None).verdict == "told"
    assert checks.Check("eager", "faults", 2, "", 0).verdict == "MISSED by 2"


def reports(**last: Any) -> list[dict[str, Any]]:
    """Those of four ranks, the last of which differs."""
    trace = {"busy_us": 5000.0, "sum_us": 2000.0, "sums": 73.0, "forbidden": []}
    one = {"host_ms": 17.0, "trace": trace, "peak_allocated": 4 << 30}
    return [one, one, one, {**one, **last, "trace": {**trace, **last.get("trace", {})}}]


def missed(found: dict[str, Any]) -> list[str]:
    return [one.what for one in checks.CHECKS["eager"](found) if one.met is False]


def test_the_bounds_of_eager_steps() -> None:
    """The fastest rank counts for busy time and sums, the slowest and the largest for the host and memory."""
    good = {"decode": {"tokens_per_s": 60.0}, "layers": 36, "utilisation": [50.0] * 4, "ranks": reports()}
    assert missed(good) == []
    assert missed({**good, "ranks": reports(trace={"busy_us": 9e9, "sum_us": 9e9})}) == []
    assert missed({**good, "ranks": reports(host_ms=19.0)}) == ["host a layer, most of ranks"]
    assert missed({**good, "ranks": reports(trace={"forbidden": ["cudaGraphLaunch"]})}) == [
        "kernels of inductor, compiled functions, graph launches in the traces"
    ]
    assert missed({**good, "ranks": reports(peak_allocated=int(4.05 * 2**30))}) == []
    assert missed({**good, "ranks": reports(peak_allocated=int(4.1 * 2**30))}) == ["ranks' memory apart"]
    assert missed({**good, "ranks": reports(peak_allocated=5 << 30)}) == [
        "torch.cuda.max_memory_allocated, most of the ranks", "ranks' memory apart"
    ]  # fmt: skip
    assert missed({**good, "utilisation": [50.0, 0.0]}) == ["GPU utilisation, least of the ranks' highest"]
    unknown = {**good, "ranks": [{"trace": None}] * 4, "utilisation": []}
    assert [one.value for one in checks.CHECKS["eager"](unknown)] == [60.0, *[None] * 7]


def test_choices_are_compared_where_the_margin_is_clear() -> None:
    """The first token of an output was chosen by the logits of the prompt's last."""
    answers = [{"prompt_ids": [1, 2, 3], "output_ids": [7, 8, 9]}]
    right = {"likeliest": [0, 0, 7, 8, 9], "margin": [9.0, 9.0, 0.5, 0.5, 0.05]}
    same = checks.compared(answers, [right], 0.1)
    assert (same["differ"], same["answered"], same["places"]) == (0, 2, 3)
    other = checks.compared(answers, [{**right, "likeliest": [0, 0, 7, 1, 1]}], 0.1)
    assert (other["differ"], round(other["clear_percent"])) == (1, 67)


def test_vllm_stands_beside_ours() -> None:
    """As a ratio, where both were measured."""
    found = list(checks.CHECKS["vllm"]({"rows": {"decode1": [200.0, 300.0], "mix": [50.0, None]}}))
    assert [(one.value, one.verdict) for one in found] == [
        (200.0, "told"), (1.5, "told"), (50.0, "told"), (None, "not measured")
    ]  # fmt: skip


def test_a_part_that_fails_or_has_no_time_leaves_the_others(tmp_path: Path) -> None:
    """Each says why; those that found something are judged."""
    tiny.write_tiny(tmp_path)
    args = acceptance.arguments(["--device", "cpu", "--model", str(tmp_path), "--seconds", "100"])
    one = acceptance.Acceptance(args, tmp_path, tmp_path / "log.txt")
    one.load = lambda: {"batch": 5.0, "mix": 6.0}
    one.http = lambda: 1 // 0
    written: list[Any] = []
    report = acceptance.all_parts(one, ["http", "load", "vllm"], lambda found: written.append(json.dumps(found)))
    early = acceptance.EndedEarly({"layers": 36, "decode": {"tokens_per_s": 50.0}})
    one.eager = lambda: (_ for _ in ()).throw(early)
    report |= acceptance.all_parts(one, ["eager"])
    assert report["eager"]["had"]["decode"] == {"tokens_per_s": 50.0}
    one.run.end = 0.0
    report |= acceptance.all_parts(one, ["graphs"])
    found, without = checks.judged(report)
    assert [(one.what, one.value) for one in found] == [("a large batch", 5.0), ("the mix", 6.0)]
    assert without == [
        "http: FAILED: ZeroDivisionError: integer division or modulo by zero",
        "vllm: left out: it needs GPUs",
        "eager: FAILED: it ended early; it had layers, decode (see the log)",
        "graphs: left out: no time is left",
    ]
    assert [len(json.loads(words)) for words in written] == [1, 2, 3]
    assert list(checks.table(found))[2] == "| load | a large batch | 5 tok/s |  | told |"


def test_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part, in order, unless told; a model that is none, and a part that is none, are refused."""
    args = acceptance.arguments([])
    assert (args.tp, args.model.name, args.device) == (4, "Qwen3-8B", "cuda")
    assert args.only == list(acceptance.PARTS) == list(checks.CHECKS)
    assert args.seconds < 580
    for wrong in (["--model", str(tmp_path)], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            acceptance.arguments(wrong)
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    """Over gloo, with real weights and a tokenizer: no part fails, and what can be judged on a CPU is met."""
    model, lite = tiny.write_tiny(tmp_path / "model", vocab_size=400), deepseeks.write(tmp_path / "lite")
    words = vs_vllm.model_folder(model, tmp_path / "words") / "tokenizer.json"
    (model / words.name).write_bytes(words.read_bytes())
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tp", "2", "--model", str(model), "--lite", str(lite)]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=400, check=False)
    found = json.loads(out.read_text())
    without = [name for name, part in found["parts"].items() if "error" in part or "left_out" in part]
    assert without == ["vllm"], done.stdout[-3000:]
    wanted = ("traces", "margins", "of them", "sums a step beside 7", "that failed", "tokens of the answer")
    judged = [one for one in found["checks"] if any(words in one["what"] for words in wanted)]
    assert len(judged) >= 7
    assert [one for one in judged if one["met"] is False] == []
