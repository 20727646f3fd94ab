"""`agentinfer generate` with several answers, and with what is said of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toys
from agentinfer.build import Settings
from agentinfer.cli import main
from agentinfer.cli.flags_said import MODES
from agentinfer.cli.said import as_json
from agentinfer.judging import MODES as ALL
from agentinfer.loop import generate, open_engine
from agentinfer.result import Completion, Result
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.request import SamplingParams
from tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    return toys.folder_of(write_tiny(tmp_path_factory.mktemp("model"), vocab_size=300), toys.byte_level())


def call(capsys: pytest.CaptureFixture[str], model: Path, *argv: object) -> tuple[int, str, str]:
    """Status, standard output and standard error of `generate` with *argv*."""
    asks = ("--prompt", "ab", "--num-blocks", 64, "--max-tokens", 6, "--seed", 5, "--ignore-eos")
    status = main([str(x) for x in ("generate", model, *asks, *argv)])
    return status, *capsys.readouterr()


def one(capsys: pytest.CaptureFixture[str], model: Path, *argv: object) -> dict[str, Any]:
    """The only object that it prints."""
    status, out, err = call(capsys, model, "--json", *argv)
    assert (status, err) == (0, "")
    (found,) = map(json.loads, out.splitlines())
    return found


def test_log_probabilities_are_shown(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """What the library gives, token by token, with offsets; of the prompt, too; nothing of it unless asked for."""
    found = one(capsys, model, "--logprobs", 2, "--prompt-logprobs", 0)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (want,) = generate(open_engine(model, Settings(num_blocks=64)), ["ab"], params)
    assert found["output_ids"] == list(want.output_ids)
    for said, record in zip(found["logprobs"], want.outputs[0].logprobs or (), strict=True):
        assert (said["token_id"], said["rank"]) == (record.token_id, 1)
        assert said["logprob"] == pytest.approx(record.logprob, abs=1e-5)
        assert [token for token, _ in said["top"]] == list(record.top_ids)
    assert found["text_offsets"] == list(want.outputs[0].text_offsets or ())
    assert found["prompt_logprobs"][0] is None
    assert [said["top"] for said in found["prompt_logprobs"][1:]] == [[]]
    assert set(one(capsys, model)) == set(found) - {"logprobs", "text_offsets", "prompt_logprobs"}


def test_processed_ones_are_of_the_draw(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """With top-k 1 every token is certain."""
    asks = ("--logprobs", 0, "--temperature", 1, "--top-k", 1)
    certain = one(capsys, model, *asks, "--logprobs-mode", "processed_logprobs")
    assert [said["logprob"] for said in certain["logprobs"]] == [0.0] * 6
    assert all(said["logprob"] < 0 for said in one(capsys, model, *asks)["logprobs"])
    assert MODES == ALL


def test_several_answers_are_listed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """All of them in their order; what the object itself says is of the first."""
    found = one(capsys, model, "--n", 3, "--temperature", 1, "--logprobs", 0)
    assert [output["index"] for output in found["outputs"]] == [0, 1, 2]
    assert len({tuple(output["output_ids"]) for output in found["outputs"]}) == 3
    assert found["outputs"][0]["output_ids"] == found["output_ids"]
    assert all(len(output["logprobs"]) == 6 for output in found["outputs"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--n", 2, "--temperature", 1], "--n: is shown with --json only"),
        (["--logprobs", 1], "--logprobs: is shown with --json only"),
        (["--prompt-logprobs", 0], "--prompt-logprobs: is shown with --json only"),
        (["--n", 2, "--json"], "--n: must be 1 for greedy sampling"),
        (["--n", 0, "--json"], "--n"),
        (["--logprobs", -1, "--json"], "--logprobs"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], model: Path, argv: list[object], said: str
) -> None:
    """One line that names the flag, before the model is opened."""
    status, out, err = call(capsys, model, *argv)
    assert (status, out) == (2, "")
    assert said in err


def test_too_many_are_refused_by_the_prompt(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """More than max_logprobs: that is the request's own error."""
    status, out, _ = call(capsys, model, "--json", "--logprobs", 21)
    assert status == 1
    assert "max_logprobs" in json.loads(out)["error"]


def test_what_json_has_not_is_null() -> None:
    """NaN and infinity."""
    odd = TokenLogprobs(1, float("nan"), 1, (2,), (float("-inf"),))
    data = as_json(Result(0, (1,), (Completion(0, (1,), None, "length", logprobs=(odd,)),), prompt_logprobs=(None,)))
    assert data["logprobs"] == [{"token_id": 1, "logprob": None, "rank": 1, "top": [[2, None]]}]
    assert json.loads(json.dumps(data, allow_nan=False)) == data
