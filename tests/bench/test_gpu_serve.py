"""benchmarks/gpu_serve.py: its parts, over a tiny model without a tokenizer, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from agentinfer.bench.load import Answer, Sent
from agentinfer.build import Settings
from agentinfer.loop import open_engine
from agentinfer.sse import Remote
from serving import options, running
from tiny import CONFIG, write_tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_serve.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu_serve  # noqa: E402 - a script, found by the line above

SIZES = evolve(gpu_serve.TINY, requests=5, stream_tokens=12, long_prompt=100)
VOCAB = CONFIG["vocab_size"]


def test_the_parts_of_a_way_of_serving(tmp_path: Path) -> None:
    """Mix, streams alone and streams beside long prompts are answered in full, by ids, and each gap is seen."""
    settings = Settings(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    chosen = options(names=(gpu_serve.NAME,))
    with running(open_engine(write_tiny(tmp_path), settings), chosen) as server:
        remote, found = Remote(server.url), {}
        for name, part in gpu_serve.ways_parts(remote, os.getpid(), SIZES, VOCAB, 2, 1):
            if name != "alone":  # as beside, without prompts
                found[name] = part()
                assert list(gpu_serve.rows("one", name, found[name]))
        server.quiet()
    wanted = sum(job.output_tokens for job in gpu_serve.mix_jobs(SIZES, VOCAB, 0))
    assert [run["output_tokens"] for run in found["mix"]["runs"]] == [wanted]
    assert found["beside"]["output_tokens"] == SIZES.streams * 12
    assert found["beside"]["itl_ms"]["max"] > 0, "a token without text is an event too"
    assert found["beside"]["long_prompts"]["sent"] >= 1


def test_what_is_wrong_with_answers() -> None:
    """An answer that is too short, and one that failed, are said."""
    job, good = Sent(0.0, (1,), 3), Answer(0.0, 0.1, 0.2, (), 1, 3)
    gpu_serve.check("mix", [job], [good])
    for bad, words in ((evolve(good, output_tokens=2), "2 tokens instead of 3"), (evolve(good, error="503"), "503")):
        with pytest.raises(RuntimeError, match=f"mix: 1 of 2 requests failed: {words}"):
            gpu_serve.check("mix", [job, job], [good, bad])


def test_a_ratio_needs_both() -> None:
    """HTTP beside offline is that of the medians; nothing is said of what was not measured."""
    report = {"offline": {"tok_s": [90.0, 110.0]}, "one": {"mix": {"tok_s": [80.0, 90.0]}}, "two": {}}
    assert gpu_serve.ratios(report) == {"one": 0.85}
    assert gpu_serve.ratios({"one": report["one"]}) == {}


def test_nothing_is_left_behind() -> None:
    """Children and orphans are killed when time is up, and by end_all."""
    program = """
import os, subprocess, sys, time
import gpu_serve
gpu_serve.adopt()
subprocess.run(["sh", "-c", "sleep 60 & sleep 0"])  # leaves an orphan
orphans = gpu_serve.descendants(os.getpid())
with gpu_serve.within(0.1):
    killed = subprocess.run(["sleep", "60"]).returncode
print(len(orphans), killed, *(os.waitpid(pid, 0)[1] for pid in orphans))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "1 -9 9\n"


def test_no_time_leaves_all_out(tmp_path: Path) -> None:
    """Without time each part is named as left out, in the file too, and the status says that not all was measured."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--seconds", "0", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout.count("left_out: ") == 3
    assert '"left_out": ["offline", "one", "two"]' in out.read_text()
