"""`agentinfer bench`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentinfer.cli import main
from agentinfer.cli.flags import make_parser
from agentinfer.cli.usage import Usage
from tiny import CONFIG, write_tiny

SMALL = ("--device", "cpu", "--num-blocks", 64)
STEPS = ("--steps", 4, "--warmup", 1, "--runs", 2)
FACTS = {"agentinfer", "python", "platform", "versions", "threads", "device", "cuda"}
ENGINE = {"model", "dtype", "ops", "settings", "limits"}
TIMES = {"median", "p10", "p90", "mean", "each"}
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `agentinfer bench` in this process: its status, standard output and standard error."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = main(["bench", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_latency_as_json(call: Call, model: Path, tmp_path: Path) -> None:
    """One object with the facts, the settings and every step's time; `--output` holds the same."""
    file = tmp_path / "out.json"
    argv = ("--batch-sizes", "1,3", "--contexts", "8,20", "--prefill", "30", "--temperature", 0.5)
    status, out, err = call("latency", model, *argv, *STEPS, *SMALL, "--json", "--output", file)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert json.loads(file.read_text()) == found
    assert set(found) == {"bench", "temperature", "prefill", "decode", *FACTS, *ENGINE}
    assert found["bench"] == "latency"
    assert found["settings"]["num_blocks"] == 64
    assert found["limits"]["max_model_len"] == 256
    assert [(x["batch_size"], x["prompt_tokens"]) for x in found["decode"]] == [(1, 8), (3, 8), (1, 20), (3, 20)]
    for case in found["decode"]:
        assert set(case["steps"]) == TIMES
        assert len(case["steps"]["each"]) == 2 * 4
        assert len(case["runs_ms"]) == 2
        assert case["utilisation"] == "no GPU"
        assert case["memory"]["host_peak_rss"] > 0
    (filled,) = found["prefill"]
    assert len(filled["times"]["each"]) == 2


def test_latency_in_words(call: Call, model: Path) -> None:
    """Without --json, a line a case."""
    status, out, err = call("latency", model, "--batch-sizes", "2", "--prefill", "5", *STEPS, *SMALL)
    assert (status, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("prefill, 5 tokens ")
    assert second.startswith("decode, batch 2, context ")
    assert " tok/s; a step median " in second


def test_the_largest_batch_raises_max_num_seqs(call: Call, model: Path) -> None:
    """A batch larger than --max-num-seqs is run all the same."""
    argv = ("--batch-sizes", "5", "--max-num-seqs", 2, "--contexts", "4")
    status, out, _ = call("latency", model, *argv, *STEPS, *SMALL, "--json")
    assert status == 0
    assert json.loads(out)["settings"]["max_num_seqs"] == 5


@pytest.mark.filterwarnings("ignore:Profiler clears events")
def test_a_profile(call: Call, model: Path, tmp_path: Path) -> None:
    """`--profile` writes a trace, of the last case; it changes nothing of what is measured."""
    traces = [tmp_path / "latency.json", tmp_path / "prefill.json", tmp_path / "mix.json"]
    mix = ("--requests", 3, "--prompt-tokens", 4, "--output-tokens", "40-50")
    assert call("latency", model, "--batch-sizes", "1,2", *STEPS, *SMALL, "--profile", traces[0])[0] == 0
    argv = ("--batch-sizes", "", "--prefill", "4,5")
    assert call("latency", model, *argv, *STEPS, *SMALL, "--profile", traces[1])[0] == 0
    assert call("throughput", model, *mix, *SMALL, "--profile", traces[2])[0] == 0
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)


def test_throughput(call: Call, model: Path) -> None:
    """The mix of the flags is served once a run; the JSON names it, its tokens, steps and first tokens."""
    argv = ("--requests", 5, "--prompt-tokens", "3-9", "--output-tokens", "2-6", "--seed", 4, "--temperature", 0.6)
    status, out, err = call("throughput", model, *argv, *SMALL, "--runs", 2, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"bench", "mix", "served", "utilisation", "memory", *FACTS, *ENGINE}
    mix = {"num_requests": 5, "prompt_tokens": [3, 9], "output_tokens": [2, 6], "temperature": 0.6, "seed": 4}
    assert found["mix"] == mix
    assert [len(run["first_token"]["each"]) for run in found["served"]] == [5, 5]
    assert len({run["output_tokens"] for run in found["served"]}) == 1
    assert call("throughput", model, *argv, *SMALL)[1].startswith("output ")


def test_who_watches_is_told_what_is_to_come(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal the number of tokens is said before they are served, from the middle of their lengths."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    argv = ("--requests", 4, "--prompt-tokens", "3-9", "--output-tokens", "2-4", "--runs", 2)
    _, _, err = call("throughput", model, *argv, *SMALL)
    assert "agentinfer: about 48 prompt tokens and 24 output tokens to come\n" in err


def test_startup(call: Call, model: Path) -> None:
    """The phases of a start, in order, with the settings they are of."""
    status, out, err = call("startup", model, *SMALL, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    (phases,) = found["starts_s"]
    assert list(phases)[-1] == "total"
    assert found["settings"]["num_blocks"] == 64


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("latency", "MODEL", "--batch-sizes", "1,x"), "--batch-sizes: must be an integer of at least 1, not 'x'"),
        (("latency", "MODEL", "--contexts", "0"), "--contexts: must be an integer of at least 1"),
        (("throughput", "MODEL", "--prompt-tokens", "9-3"), "--prompt-tokens: must be SHORTEST-LONGEST, not '9-3'"),
        (("throughput", "MODEL", "--output-tokens", "3-"), "--output-tokens: must be an integer of at least 1, not ''"),
        (("throughput", "MODEL", "--output-tokens", "5-6-7"), "--output-tokens: must be an integer of at least 1"),
        (("latency", "MODEL", "--contexts", "100"), "--max-model-len: is 256; 1 sequences of"),
        (("latency", "MODEL", "--max-num-batched-tokens", "2"), "--max-num-batched-tokens: is 2; 8 sequences of"),
        (("latency", "/no/such/model"), "/no/such/model: no such folder"),
        (("startup", "/no/such/model"), "/no/such/model: no such folder"),
        (("latency", "MODEL", "--output", "/no/such/folder/x"), "--output: /no/such/folder: no such folder"),
        (("latency", "MODEL", "--profile", "/no/such/folder/x"), "--profile: /no/such/folder: no such folder"),
    ],
)
def test_refused(call: Call, model: Path, argv: tuple[str, ...], words: str) -> None:
    """What can not be is one line on standard error that names the flag, and exit status 2."""
    given = [str(model) if x == "MODEL" else x for x in argv]
    status, out, err = call(*given, *(("--batch-sizes", "8") if "--max-num-batched-tokens" in argv else ()), *SMALL)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("bench", ["latency", "throughput", "startup"])
def test_dummy_weights(call: Call, tmp_path: Path, bench: str) -> None:
    """With --dummy-weights a folder that holds nothing but config.json is enough."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    argv = {
        "latency": ("--batch-sizes", "2", *STEPS),
        "throughput": ("--requests", 2, "--prompt-tokens", 4, "--output-tokens", 3),
        "startup": (),
    }
    status, out, err = call(bench, tmp_path, *argv[bench], *SMALL, "--dummy-weights", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["settings"]["dummy_weights"] is True
    assert call(bench, tmp_path, *argv[bench], *SMALL)[0] == 2


def test_dummy_weights_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`generate` takes them, too, and speaks in token ids."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    argv = ("generate", str(tmp_path), "--prompt-ids", "1,2,3", "--max-tokens", "4", "--ignore-eos", "--json")
    assert main([*argv, "--dummy-weights", *map(str, SMALL)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["output_ids"]) == 4
    assert found["text"] is None


def test_a_start_that_dies_is_one_line(call: Call, tmp_path: Path) -> None:
    """A folder without a model is refused with what the new process said last."""
    status, _, err = call("startup", tmp_path, *SMALL)
    assert status == 2
    assert "CheckpointError" in err
    assert err.count("\n") == 1


def test_bench_needs_to_be_told_what() -> None:
    """`agentinfer bench` alone is wrong usage."""
    with pytest.raises(Usage):
        make_parser().parse_args(["bench"])
