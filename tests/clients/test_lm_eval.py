"""lm-eval: `examples/lm_eval_local.sh` asks a server of the demo model. Run by name: `pytest tests/clients`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sources
from agentinfer.build import Settings
from agentinfer.demo import default_cache, ensure_demo
from agentinfer.loop import Engine, open_engine
from agentinfer.scoring import score
from agentinfer.text import encode
from serving import COMMANDS, command, options, running, with_forward

pytestmark = pytest.mark.skipif(
    command("lm_eval") is None, reason="lm_eval is not installed: pip install 'agentinfer[clients]'"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_demo(default_cache(), print)


def evaluate(url: str, folder: Path, work: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results and the samples that lm-eval writes of the example's task; it must end well."""
    example = sources.ROOT / "examples" / "lm_eval_local.sh"
    given = ["sh", str(example), "demo", str(folder), "--output_path", str(work / "out"), "--log_samples"]
    env = {**os.environ, "PATH": COMMANDS, "BASE_URL": url, "HF_HOME": str(work / "hub")}
    done = subprocess.run(given, env=env, capture_output=True, text=True, check=False, cwd=work, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (work / "out").rglob("results_*.json")
    (samples,) = (work / "out").rglob("samples_local_facts_*.jsonl")
    return json.loads(results.read_text("utf-8")), [json.loads(s) for s in samples.read_text("utf-8").splitlines()]


def likelihood(engine: Engine, context: str, choice: str) -> float:
    """The log-probability of *choice* after *context*: the sum of its tokens'."""
    assert engine.text is not None
    before = len(encode(engine.text, context))
    (found,) = score(engine, [encode(engine.text, context + choice)])
    return float(found.logprobs[before - 1 :].sum(dtype=np.float64))


def upside_down(engine: Engine) -> Engine:
    """*engine*, whose model finds likely what it found unlikely."""
    inner = engine.machine.model.forward

    def forward(*given: Any) -> Any:
        logits_SV, kv = inner(*given)
        return -logits_SV, kv

    return with_forward(engine, forward)


@pytest.mark.parametrize("negated", [False, True])
def test_lm_eval_measures_the_model(negated: bool, folder: Path, tmp_path: Path) -> None:
    """The demo model knows all answers, and none with its logits negated; each likelihood is the engine's own."""
    engine = open_engine(folder, Settings(num_blocks=400, max_model_len=512))
    engine = upside_down(engine) if negated else engine
    with running(engine, options(names=("demo",), max_queued=1000)) as server:
        results, samples = evaluate(server.url, folder, tmp_path)
        server.quiet()
    assert results["results"]["local_facts"]["acc,none"] == (0.0 if negated else 1.0)
    assert len(samples) == results["n-samples"]["local_facts"]["effective"] == 4
    for sample in samples:
        asked = [tuple(sample["arguments"][f"gen_args_{i}"][f"arg_{k}"] for k in (0, 1)) for i in range(3)]
        want = [likelihood(engine, *one) for one in asked]
        np.testing.assert_allclose([float(one[0]) for one in sample["filtered_resps"]], want, atol=1e-4)
