"""The command line: what it prints where, its exit status, and what it says when something is wrong."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

import sources
import toys
from agentinfer.build import Settings
from agentinfer.cli import chat as chat_command
from agentinfer.cli import generate as generate_command
from agentinfer.cli import main
from agentinfer.cli.flags import make_parser
from agentinfer.cli.opened import params_of
from agentinfer.cli.usage import Usage
from agentinfer.errors import AgentInferError
from agentinfer.loop import Delta, generate, open_engine, stream
from agentinfer.state.request import SamplingParams
from agentinfer.text import chat
from tiny import write_tiny

KEYS = ["index", "prompt_ids", "output_ids", "text", "finish_reason", "cached_tokens", "error"]
SMALL = ("--num-blocks", "64")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of bytes and a chat template."""
    folder = toys.folder_of(tmp_path_factory.mktemp("talker"), toys.byte_level(), toys.CHATML)
    return write_tiny(folder, vocab_size=288, eos_token_id=287, max_position_embeddings=512)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process: its status, standard output and standard error."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = main([str(x) for x in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def one_line(err: str) -> str:
    """*err*, which must be one line that is no traceback."""
    assert re.fullmatch(r"agentinfer: [^\n]+\n", err), err
    assert "Traceback" not in err
    return err


def python(*argv: object, **more: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(sources.SRC), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([sys.executable, "-m", "agentinfer", *map(str, argv)], text=True, env=env, **pipes)


# --- generate ------------------------------------------------------------------------------------------------------


def test_json_is_one_object_a_prompt(call: Call, model: Path) -> None:
    """Standard output holds one JSON object a prompt, in order and with the documented keys, and nothing else."""
    prompts = [(1, 2, 3), (4,), (5, 6)]
    argv = [x for ids in prompts for x in ("--prompt-ids", ",".join(map(str, ids)))]
    status, out, err = call("generate", model, *argv, *SMALL, "--max-tokens", 7, "--json")
    assert (status, err) == (0, "")
    found = objects(out)
    engine = open_engine(model, Settings(num_blocks=64))
    expected = generate(engine, prompts, SamplingParams(max_tokens=7, temperature=0))
    assert [list(x) for x in found] == [KEYS] * 3
    assert [tuple(x["output_ids"]) for x in found] == [x.output_ids for x in expected]
    assert [(x["index"], tuple(x["prompt_ids"]), x["text"], x["error"]) for x in found] == [
        (i, ids, None, None) for i, ids in enumerate(prompts)
    ]


def test_a_refused_prompt_fails_alone(call: Call, model: Path) -> None:
    """Empty, too long and impossible prompts, and text without a tokenizer, say why; the others are completed."""
    bad = [
        "--prompt-ids",
        "",
        "--prompt-ids",
        "96",
        "--prompt-ids=-1,2",
        "--prompt",
        "hello",
        "--prompt-ids",
        f"{2**70}",
    ]
    bad += ["--prompt-ids", ",".join("1" * 256)]
    status, out, err = call("generate", model, *bad, "--prompt-ids", "1,2,3", *SMALL, "--max-tokens", 5, "--json")
    assert (status, err) == (1, "")
    *refused, good = objects(out)
    for found, words in zip(
        refused,
        (
            "no tokens",
            "96 is outside the vocabulary",
            "no token id: -1",
            "no tokenizer",
            "no token id",
            "has 256 tokens",
        ),
        strict=True,
    ):
        assert words in found["error"]
        assert (found["finish_reason"], found["output_ids"]) == ("rejected", [])
    _, alone, _ = call("generate", model, "--prompt-ids", "1,2,3", *SMALL, "--max-tokens", 5, "--json")
    assert good == {**objects(alone)[0], "index": 6}
    assert good["error"] is None


def test_a_prompt_that_is_refused_alone_is_one_line(call: Call, model: Path) -> None:
    """Without --json a refused prompt is an error line and exit status 1."""
    status, out, err = call("generate", model, "--prompt-ids", "", *SMALL)
    assert (status, out) == (1, "")
    assert "prompt: has no tokens" in one_line(err)


def test_a_step_that_raises_fails_its_prompts(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model raises is the error of the prompts in that step, and exit status 1."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("agentinfer.steps.prefill_step", broken)
    status, out, err = call("generate", model, "--prompt-ids", "1,2", *SMALL, "--max-tokens", 4, "--json")
    assert (status, err) == (1, "")
    assert objects(out)[0]["finish_reason"] == "error"
    assert "RuntimeError: out of order" in objects(out)[0]["error"]


def test_one_prompt_is_streamed(call: Call, talker: Path, model: Path) -> None:
    """One prompt's text comes on standard output, or its token ids where there is no tokenizer."""
    argv = (*SMALL, "--max-tokens", 12)
    _, out, _ = call("generate", talker, "--prompt", "hello", *argv, "--json")
    assert call("generate", talker, "--prompt", "hello", *argv) == (0, objects(out)[0]["text"] + "\n", "")
    _, out, _ = call("generate", model, "--prompt-ids", "3,4", *argv, "--json")
    status, shown, _ = call("generate", model, "--prompt-ids", "3,4", *argv)
    assert (status, [int(x) for x in shown.split()]) == (0, objects(out)[0]["output_ids"])


def test_several_prompts_come_as_blocks(call: Call, talker: Path) -> None:
    """Each prompt has a labelled block; a refused one is said on standard error too, by its number."""
    argv = ("--prompt", "hello", "--prompt-ids", "1,2", "--prompt-ids", "999", *SMALL, "--max-tokens", 6)
    _, out, _ = call("generate", talker, *argv, "--json")
    texts = [x["text"] for x in objects(out)]
    status, shown, err = call("generate", talker, *argv)
    assert status == 1
    assert shown.startswith(f"=== 0: hello\n{texts[0]}\n--- length, 6 tokens")
    assert f"=== 1: 1,2\n{texts[1]}\n--- length" in shown
    assert "=== 2: 999\n--- rejected" in shown
    assert "prompt 2: prompt: token id 999 is outside the vocabulary" in one_line(err)


def test_flags_reach_the_engine(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine flag arrives in Settings and each sampling flag in SamplingParams; unset, theirs hold, but greedy."""
    seen: list[Any] = []

    def spy(folder: Path, settings: Settings) -> Any:
        seen.append(settings)
        return open_engine(folder, evolve(settings, num_blocks=64))

    def watch(engine: Any, prompts: Any, params: SamplingParams) -> Any:
        seen.append(params)
        return generate(engine, prompts, params)

    monkeypatch.setattr("agentinfer.loop.open_engine", spy)
    monkeypatch.setattr(generate_command, "generate", watch)
    given = "--dtype bfloat16 --device cpu --policy reserve --block-size 8 --num-blocks 40 --max-model-len 100"
    given += " --max-num-seqs 3 --max-num-batched-tokens 32 --kv-utilization 0.5 --reserve-gib 1 --kv-gib 0.25"
    given += (
        " --no-prefix-cache --no-overlap --max-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 11"
    )
    given += " --stop-token-ids 5,6 --ignore-eos"
    assert call("generate", model, "--prompt-ids", "1", "--json", *given.split())[0] == 0
    assert call("generate", model, "--prompt-ids", "1", "--json")[0] == 0
    assert seen == [
        Settings(
            dtype="bfloat16", device="cpu", policy="reserve", block_size=8, num_blocks=40, max_model_len=100,
            max_num_seqs=3, max_num_batched_tokens=32, kv_utilization=0.5, reserve_gib=1.0, kv_gib=0.25,
            prefix_cache=False, overlap=False,
        ),
        SamplingParams(
            max_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, stop_token_ids=(5, 6),
            ignore_eos=True,
        ),
        Settings(),
        SamplingParams(temperature=0.0),
    ]  # fmt: skip


def test_stop_texts_reach_the_engine(call: Call, model: Path) -> None:
    """Each --stop is one text, refused as the flag if it is empty, and by a model without a tokenizer."""
    args = make_parser().parse_args(["generate", "MODEL", "--stop", "a b", "--stop", "c"])
    assert params_of(args).stop == ("a b", "c")
    status, out, _ = call("generate", model, "--prompt-ids", "1", "--stop", "a", "--json")
    assert (status, objects(out)[0]["error"].split(":")[0]) == (1, "stop")
    with pytest.raises(Usage, match="--stop: item 0"):
        params_of(make_parser().parse_args(["generate", "MODEL", "--stop", ""]))


def test_help_names_every_flag_of_generate() -> None:
    """`generate --help` documents the flags, that it is greedy by default, and the exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    (generate_parser,) = [
        action.choices["generate"] for action in make_parser()._actions if isinstance(action.choices, dict)
    ]
    says = " ".join(generate_parser.format_help().split())
    for name in ("--prompts-file", "--stop-token-ids", "--kv-gib", "--no-overlap", "--record", "--json", "--min-p"):
        assert name in says
    assert "likeliest token, which is the default here" in says
    assert "Exit status: 0;" in says


def test_a_seed_is_every_prompts_seed(call: Call, model: Path) -> None:
    """With --seed a prompt's tokens are the same alone, beside others and twice over, and another seed gives others."""
    argv = (*SMALL, "--max-tokens", 12, "--temperature", 1, "--json", "--ignore-eos")
    three = ("--prompt-ids", "1,2", "--prompt-ids", "9", "--prompt-ids", "1,2")
    _, out, _ = call("generate", model, *three, *argv, "--seed", 5)
    first, _, third = (x["output_ids"] for x in objects(out))
    _, out, _ = call("generate", model, "--prompt-ids", "1,2", *argv, "--seed", 5)
    assert first == third == objects(out)[0]["output_ids"]
    _, out, _ = call("generate", model, "--prompt-ids", "1,2", *argv, "--seed", 6)
    assert objects(out)[0]["output_ids"] != first


def test_stop_tokens_end_an_output(call: Call, model: Path) -> None:
    """--stop-token-ids ends the output at that token, which is part of output_ids."""
    argv = ("generate", model, "--prompt-ids", "1,2,3", *SMALL, "--max-tokens", 8, "--ignore-eos", "--json")
    (whole,) = objects(call(*argv)[1])
    stop = whole["output_ids"][3]
    (ended,) = objects(call(*argv, "--stop-token-ids", f"{stop},95")[1])
    end = whole["output_ids"].index(stop) + 1
    assert (ended["output_ids"], ended["finish_reason"]) == (whole["output_ids"][:end], "stop")


# --- prompts -------------------------------------------------------------------------------------------------------


def test_prompts_keep_the_order_in_which_they_are_given(call: Call, talker: Path, tmp_path: Path) -> None:
    """Flags and files of prompts mix, each in its place, blank lines are no prompts, and bad ids fail alone."""
    file = tmp_path / "p.jsonl"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\n\n{"prompt_ids": [7, 8]}\r\n{"prompt_ids": [1, "x", 2.5]}', "utf-8")
    argv = ("--prompt-ids", "1", "--prompts-file", file, "--prompt", "z", *SMALL, "--max-tokens", 2, "--json")
    status, out, _ = call("generate", talker, *argv)
    found = objects(out)
    assert status == 1
    assert [len(x["prompt_ids"]) for x in found] == [1, 5, 2, 3, 1]  # U+2028 is three bytes
    assert [found[i]["prompt_ids"] for i in (0, 2, 3)] == [[1], [7, 8], [1, "x", 2.5]]
    assert [x["error"] is None for x in found] == [True, True, True, False, True]
    assert "item 1 is no token id: 'x'" in found[3]["error"]


def test_prompts_come_from_standard_input(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompts file named - is standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt_ids": [1]}\n{"prompt_ids": [2]}\n'))
    status, out, _ = call("generate", model, "--prompts-file", "-", *SMALL, "--max-tokens", 1, "--json")
    assert (status, [x["prompt_ids"] for x in objects(out)]) == (0, [[1], [2]])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no valid JSON"),
        ("[1, 2]", "must be an object"),
        ('{"text": "a"}', "must have prompt or prompt_ids and nothing else"),
        ("{}", "must have prompt or prompt_ids"),
        ('{"prompt": "a", "prompt_ids": [1]}', "nothing else"),
        ('{"prompt": "a", "max_tokens": 3}', "nothing else, not ['max_tokens', 'prompt']"),
        ('{"prompt": 5}', "prompt must be a text"),
        ('{"prompt_ids": "1,2"}', "prompt_ids must be a list"),
        ('{"prompt": "a", "prompt": "b"}', "given twice"),
        ('{"prompt_ids": [NaN]}', "NaN is no JSON"),
        ('{"prompt_ids": [1e999]}', "1e999 is no number that can be held"),
        ('{"prompt_ids": [2, -1e999]}', "-1e999 is no number that can be held"),
        ("[" * 100_000, "no valid JSON"),
    ],
)
def test_a_malformed_line_is_wrong_usage(call: Call, model: Path, tmp_path: Path, line: str, words: str) -> None:
    """A line that is no prompt ends the command before any model is opened, and is named."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [1]}\n' + line + "\n", "utf-8")
    status, out, err = call("generate", model, "--prompts-file", file, "--json")
    assert (status, out) == (2, "")
    assert f"--prompts-file: {file}, line 2: " in one_line(err)
    assert words in err


# --- wrong usage and wrong models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "required: COMMAND"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("generate", "required: MODEL"),
        ("generate MODEL", "give --prompt, --prompt-ids or --prompts-file"),
        ("generate MODEL --prompt-ids 1,two", "--prompt-ids: must be token ids"),
        ("generate MODEL --prompt-ids 1,", "--prompt-ids: must be token ids"),
        ("generate MODEL --prompts-file /no/such.jsonl", "--prompts-file: /no/such.jsonl: No such file"),
        ("generate MODEL --prompt-ids 1 --max-tokens 0", "--max-tokens: must be an integer of at least 1, not '0'"),
        ("generate MODEL --prompt-ids 1 --max-tokens many", "--max-tokens: must be an integer of at least 1"),
        ("generate MODEL --prompt-ids 1 --temperature -1", "--temperature: must be a number in [0, 1e+06], not '-1'"),
        ("generate MODEL --prompt-ids 1 --temperature nan", "--temperature: must be a number"),
        ("generate MODEL --prompt-ids 1 --temperature inf", "--temperature: must be a number"),
        ("generate MODEL --prompt-ids 1 --top-p 0", "--top-p: must be a number in (0, 1]"),
        ("generate MODEL --prompt-ids 1 --top-p 1.5", "--top-p: must be a number in (0, 1]"),
        ("generate MODEL --prompt-ids 1 --top-k -2", "--top-k: must be an integer of at least -1"),
        ("generate MODEL --prompt-ids 1 --top-k 99999999999", "--top-k: must be an integer in"),
        ("generate MODEL --prompt-ids 1 --min-p 2", "--min-p: must be a number in [0, 1]"),
        ("generate MODEL --prompt-ids 1 --seed -5", "--seed: must be an integer of at least 0"),
        ("generate MODEL --prompt-ids 1 --seed 9999999999999999999", "--seed: must be an integer in"),
        ("generate MODEL --prompt-ids 1 --stop-token-ids x", "--stop-token-ids: must be token ids"),
        ("generate MODEL --prompt-ids 1 --stop-token-ids=-4", "--stop-token-ids: item 0 is no token id: -4"),
        ("generate MODEL --prompt-ids 1 --policy fair", "--policy: invalid choice: 'fair'"),
        ("generate MODEL --prompt-ids 1 --dtype int4", "--dtype: invalid choice: 'int4'"),
        ("generate MODEL --prompt-ids 1 --device tpu", "--device: 'tpu' is no device"),
        ("generate MODEL --prompt-ids 1 --num-blocks -3", "--num-blocks: must be an integer of at least 1"),
        ("generate MODEL --prompt-ids 1 --num-blocks 99999999999999999999", "--num-blocks: must be an integer in [1, "),
        ("generate MODEL --prompt-ids 1 --max-num-seqs 99999999999999999999", "--max-num-seqs: must be an integer in"),
        ("generate MODEL --prompt-ids 1 --kv-gib 1e300", "--kv-gib: must be in (0, 1e+06]"),
        ("generate MODEL --prompt-ids 1 --kv-utilization 1.1", "--kv-utilization: must be a number in (0, 1]"),
        ("generate MODEL --prompt-ids 1 --reserve-gib -1", "--reserve-gib: must be a number in [0, "),
        ("generate MODEL --prompt-ids 1 --kv-gib 0", "--kv-gib: must be a number in (0, "),
        ("generate MODEL --prompt-ids 1 --kv-gib 0.000001", "but one request of --max-model-len needs"),
        ("generate MODEL --prompt-ids 1 --max-model-len 9999", "--max-model-len: 9999; the model is made for 1 to 256"),
        ("generate MODEL --prompt-ids 1 --record /no/such/folder/f", "--record: /no/such/folder/f: No such file"),
        ("generate MODEL --prompt-ids 1 --frob", "unrecognized arguments: --frob"),
        ("generate MODEL --prompt-ids 1 --max-tok 3", "unrecognized arguments: --max-tok 3"),
        ("plan MODEL --memory-gib 0", "--memory-gib: must be a number in (0, "),
        ("plan MODEL --memory-gib 1e300", "--memory-gib: must be in (0, 1e+06], not 1e+300"),
        ("plan MODEL --tp 3", "--tp: 3 ranks can not share 4 heads"),
        ("plan MODEL --tp 2 --ep", "--ep: Qwen3ForCausalLM has no experts to spread over ranks"),
        ("generate MODEL --prompt-ids 1 --ep", "--ep: Qwen3ForCausalLM has no experts to spread over ranks"),
        ("serve MODEL --port 70000", "--port: must be an integer in [0, 65535], not '70000'"),
        ("bench serve --url localhost", "--url: must be http://HOST:PORT/PATH, or https, not 'localhost'"),
        ("bench serve --url http://localhost:99999", "--url: must be http://HOST:PORT/PATH, or https"),
        ("chat --url http://[::1", "--url: must be http://HOST:PORT/PATH, or https"),
        ("chat MODEL --num-blocks 64", "has no tokenizer, so it can not chat"),
        ("replay /no/such/trace", "/no/such/trace: No such file"),
    ],
)
def test_wrong_usage_is_one_line(call: Call, model: Path, argv: str, words: str) -> None:
    """Wrong usage gives exit status 2, nothing on standard output, and one line that names the flag and the fault."""
    status, out, err = call(*(model if x == "MODEL" else x for x in argv.split()))
    assert (status, out) == (2, "")
    assert words in one_line(err)


@pytest.mark.parametrize("error", [ValueError, OverflowError, TypeError])
def test_whatever_opening_raises_is_one_line(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """An error that nobody foresaw while a model is opened is one line too, with its kind."""

    def fail(*_: object) -> None:
        raise error("out of the blue")

    monkeypatch.setattr("agentinfer.loop.build", fail)
    status, out, err = call("generate", model, "--prompt-ids", "1")
    assert (status, out) == (2, "")
    assert f"{error.__name__}: out of the blue" in one_line(err)


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    """A tiny checkpoint whose file *name* has this content, or is missing."""
    write_tiny(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json: missing"),
        ("config.json", b"{", "config.json: no valid JSON"),
        ("config.json", b'{"architectures": ["GPT9ForCausalLM"]}', "GPT9ForCausalLM is not supported; supported are"),
        ("model.safetensors", None, "holds no weights"),
        ("model.safetensors", b"garbage", "model.safetensors: truncated, corrupt or unreadable"),
        ("tokenizer.json", b"{}", "tokenizer.json: no tokenizer that can be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../x"}}', "no plain file name"),
    ],
)
def test_a_wrong_model_is_one_line(call: Call, tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    """A model that can not be opened gives exit status 2 and one line that names the file and the fault."""
    folder = damaged(tmp_path / "model", name, content)
    status, out, err = call("generate", folder, "--prompt-ids", "1", *SMALL, "--json")
    assert (status, out) == (2, "")
    assert words in one_line(err)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "no such folder"),
        ("./nothing-here", "no such folder"),
        (__file__, "is a file; a model is a folder"),
        ("", "MODEL is empty"),
        ("someone/some-model-that-is-not-here", "no such folder here, not in the hub's cache"),
        ("some-model-that-is-not-here", "no such folder here, not in the hub's cache"),
    ],
)
def test_a_model_that_is_nowhere_is_one_line(call: Call, name: str, words: str) -> None:
    """A folder that is not there, a file, and a hub id that can not be had each say so in one line."""
    for command in (("generate", name, "--prompt", "x"), ("plan", name), ("chat", name)):
        status, out, err = call(*command)
        assert (status, out) == (2, "")
        assert words in one_line(err)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError, "the model is gated"),
        (RepositoryNotFoundError, "the hub has no such model"),
        (LocalEntryNotFoundError, "the hub can not be reached"),
        (ValueError, "the hub did not give it: ValueError"),
    ],
)
def test_what_the_hub_says_is_one_line(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: type[Exception], words: str
) -> None:
    """Each way in which the hub refuses a model has a line of its own."""

    def refuse(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    status, out, err = call("generate", "someone/model", "--prompt", "x")
    assert (status, out) == (2, "")
    assert "someone/model: " in one_line(err)
    assert words in err


def test_only_what_is_needed_is_fetched(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id becomes the folder of its snapshot; `generate` fetches safetensors, `plan` no weights, nobody others."""
    fetched: list[tuple[str, list[str]]] = []

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        fetched.append((repo_id, allow_patterns))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert call("plan", "someone/model", "--memory-gib", 1)[0] == 0
    assert call("generate", "someone/model", "--prompt-ids", "1", *SMALL, "--max-tokens", 1)[0] == 0
    repository = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "pytorch_model.bin", "x.gguf")
    taken = [[f for f in repository if any(fnmatch(f, pattern) for pattern in patterns)] for _, patterns in fetched]
    assert [name for name, _ in fetched] == ["someone/model"] * 2
    assert taken == [["config.json", "tokenizer.json"], list(repository[:3])]


def test_warnings_wait_until_the_model_is_open(call: Call, tmp_path: Path) -> None:
    """What the loader warns of is said, on standard error, once all went well."""
    folder = write_tiny(tmp_path / "model", tie_word_embeddings=True)
    status, out, err = call("generate", folder, "--prompt-ids", "1", *SMALL, "--max-tokens", 1, "--json")
    assert (status, len(objects(out))) == (0, 1)
    assert err == "" or "lm_head.weight" in one_line(err)


def test_a_warning_is_said_once(call: Call, tmp_path: Path) -> None:
    """What reading the config warns of is one line, however often it is read."""
    folder = write_tiny(tmp_path / "model", torch_dtype="bfloat16")
    status, _, err = call("generate", folder, "--prompt-ids", "1", *SMALL, "--max-tokens", 1, "--json")
    assert status == 0
    assert "dtype wins" in one_line(err)


# --- record and replay ---------------------------------------------------------------------------------------------


@pytest.fixture
def trace(call: Call, model: Path, tmp_path: Path) -> Path:
    """A recorded run of several prompts, one refused."""
    file = tmp_path / "run.jsonl"
    argv = ("--prompt-ids", "1,2,3", "--prompt-ids", "4", "--prompt-ids", "99", "--prompt-ids", "1,2,3,4,5,6,7,8,9")
    status, _, _ = call(
        "generate", model, *argv, *SMALL, "--max-tokens", 9, "--block-size", 4, "--record", file, "--json"
    )
    assert status == 1
    return file


@pytest.mark.parametrize("more", [(), ("--policy", "reserve"), ("--no-overlap", "--no-prefix-cache")], ids=str)
def test_a_recorded_run_is_replayed(call: Call, model: Path, tmp_path: Path, more: Sequence[str]) -> None:
    """A recorded run is lived through again without a model, every digest agreeing, whatever the policy."""
    file = tmp_path / "run.jsonl"
    prompts = [x for i in range(9) for x in ("--prompt-ids", ",".join(map(str, range(i + 1))))]
    argv = (*SMALL, "--max-tokens", 20, "--max-num-seqs", 4, "--max-num-batched-tokens", 8, "--temperature", 1)
    status, out, _ = call("generate", model, *prompts, *argv, *more, "--record", file, "--json")
    assert (status, len(objects(out))) == (0, 9)
    assert {"agentinfer_trace", "limits", "policy"} == json.loads(file.read_text().splitlines()[0]).keys()
    status, out, err = call("replay", file, "--json")
    events = len(file.read_text().splitlines()) - 1
    assert (status, err, json.loads(out)) == (0, "", {"events": events, "agree": True, "first_difference": None})
    assert call("replay", file)[1].endswith("every digest agrees\n")


def test_a_digest_that_differs_is_found(call: Call, trace: Path) -> None:
    """Exit status 1 names the first event after which the state is another one."""
    lines = trace.read_text().splitlines()
    for number in (1, 7, len(lines) - 1):
        event = json.loads(lines[number])
        changed = json.dumps({**event, "digest": "0" * 16})
        trace.write_text("\n".join([*lines[:number], changed, *lines[number + 1 :]]))
        status, out, err = call("replay", trace, "--json")
        assert (status, err, json.loads(out)["first_difference"]) == (1, "", number - 1)
        assert f"line {number + 1}" in call("replay", trace)[1]


def test_an_event_that_was_changed_is_found(call: Call, trace: Path) -> None:
    """A token that is another one shows as a state that differs."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    landed = next(i for i, line in enumerate(lines) if line.get("event") == "Landed")
    lines[landed]["tokens"][0] ^= 1
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = call("replay", trace, "--json")
    assert (status, json.loads(out)["agree"]) == (1, False)


def edit_lines(path: Path, edit: Callable[[list[str]], list[str]]) -> None:
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: [], "line 1: no valid JSON"),
        (lambda lines: lines[1:], "not a trace"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "no valid JSON"),
        (lambda lines: [lines[0], "[]", *lines[1:]], "line 2: no JSON object"),
        (lambda lines: [lines[0].replace('"agentinfer_trace": 2', '"agentinfer_trace": 99'), *lines[1:]], "version 99"),
        (lambda lines: [lines[0].replace("throughput", "chance"), *lines[1:]], "policy 'chance' is none of"),
        (lambda lines: [lines[0].replace('"block_size": 4', '"block_size": 0'), *lines[1:]], "block_size"),
        (lambda lines: [lines[0].replace('"block_size"', '"size"'), *lines[1:]], "size"),
        (lambda lines: [re.sub(r'"limits": \{.*?\}', '"limits": 3', lines[0]), *lines[1:]], "incomplete trace"),
        (lambda lines: [*lines, '{"event": "Exploded", "digest": ""}'], "unknown event 'Exploded'"),
        (lambda lines: [*lines, '{"event": "Stepped"}'], "digest"),
        (lambda lines: [*lines, '{"event": "Landed", "step": 0, "tokens": [], "digest": ""}'], "not in flight"),
        (lambda lines: [*lines, '{"event": "Landed", "digest": ""}'], "not an event"),
        (lambda lines: [lines[0].replace('"num_blocks": 64', f'"num_blocks": {10**11}'), *lines[1:]], "num_blocks"),
        (lambda lines: [lines[0].replace('"num_blocks": 64', f'"num_blocks": {10**30}'), *lines[1:]], "num_blocks"),
        (
            lambda lines: [re.sub(r'("event": "Landed".*"tokens": \[)', rf"\g<1>{2**40}, ", x) for x in lines],
            "Overflow",
        ),
        (lambda lines: [x.replace('"salt": null', '"salt": 5') for x in lines], "salt: must be a str, not 5"),
        (
            lambda lines: [*lines, '{"event": "Forked", "seq": 0, "seeds": [1.5], "digest": ""}'],
            "seeds: item 0",
        ),
    ],
)
def test_a_damaged_trace_is_one_line(
    call: Call, trace: Path, edit: Callable[[list[str]], list[str]], words: str
) -> None:
    """A file that is no trace, or one that can not be lived through, gives exit status 2 and says why."""
    edit_lines(trace, edit)
    status, out, err = call("replay", trace)
    assert (status, out) == (2, "")
    assert words in one_line(err)


def test_replay_needs_no_torch(trace: Path) -> None:
    """`replay` imports neither torch nor anything that loads models."""
    code = f"""
import sys
sys.path.insert(0, {str(sources.SRC)!r})
from agentinfer.cli import main
status = main(["replay", {str(trace)!r}])
assert not {{"torch", "transformers", "tokenizers", "safetensors"}} & sys.modules.keys()
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_nothing_heavy() -> None:
    """`--help` and wrong usage answer at once: neither numpy nor attrs nor torch is imported for them."""
    code = f"""
import sys
sys.path.insert(0, {str(sources.SRC)!r})
from agentinfer.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
assert main(["generate", "m", "--top-p", "7"]) == 2
assert not {{"torch", "numpy", "attrs", "attr", "rpds", "huggingface_hub"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


# --- chat ----------------------------------------------------------------------------------------------------------


def answers(folder: Path, conversations: Sequence[Sequence[dict[str, str]]], max_tokens: int) -> list[str]:
    """What the library answers to each conversation."""
    engine = open_engine(folder, Settings(num_blocks=64))
    assert engine.text is not None
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [
        "".join(delta.text for delta in stream(engine, chat(engine.text, messages), params))
        for messages in conversations
    ]


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chat_keeps_the_conversation(call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions from a pipe are answered one by one, each with all that was said before, until /new or /quit."""
    system = say("system", "be brief")
    (first,) = answers(talker, [[system, say("user", "hello")]], 6)
    so_far = [system, say("user", "hello"), say("assistant", first)]
    expected = answers(talker, [so_far[:2], [*so_far, say("user", "more")], [system, say("user", "again")]], 6)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n  more  \n/new\nagain\n/quit\nnever asked\n"))
    status, out, err = call("chat", talker, "--system", "be brief", *SMALL, "--max-tokens", 6)
    assert (status, err) == (0, "")
    assert out == "".join(answer if answer.endswith("\n") else answer + "\n" for answer in expected)


def test_chat_goes_on_after_a_refusal(call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that does not fit is refused in one line, the next one is answered, and the exit status is 1."""
    (expected,) = answers(talker, [[say("user", "hi")]], 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("long " * 200 + "\nhi\n"))
    status, out, err = call("chat", talker, *SMALL, "--max-tokens", 4)
    assert (status, out.rstrip("\n")) == (1, expected.rstrip("\n"))
    assert "max_model_len 512" in one_line(err)


def test_chat_needs_a_template(call: Call, tmp_path: Path) -> None:
    """A model without a chat template is refused before any question."""
    folder = write_tiny(toys.folder_of(tmp_path / "m", toys.byte_level()), vocab_size=288)
    status, out, err = call("chat", folder, *SMALL)
    assert (status, out) == (2, "")
    assert "has no chat template" in one_line(err)


def test_ctrl_c_ends_an_answer(call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first SIGINT ends the answer between two steps; the conversation goes on with what had been said."""
    heard: list[Any] = []

    def interrupted(engine: Any, ids: Any, params: SamplingParams) -> Iterator[Delta]:
        heard.append(tuple(ids))
        for i, delta in enumerate(stream(engine, ids, params)):
            yield delta
            if i == 2 and len(heard) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_command, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nmore\n"))
    before = signal.getsignal(signal.SIGINT)
    status, out, _ = call("chat", talker, *SMALL, "--max-tokens", 40)
    assert (status, len(heard)) == (0, 2)
    assert signal.getsignal(signal.SIGINT) is before
    engine = open_engine(talker, Settings(num_blocks=64))
    assert engine.text is not None
    params = SamplingParams(max_tokens=40, temperature=0)
    pieces = [delta.text for delta in stream(engine, heard[0], params)]
    partial = next("".join(pieces[:n]) for n in (3, 4) if out.startswith("".join(pieces[:n]) + "\n"))
    so_far = [say("user", "hello"), say("assistant", partial), say("user", "more")]
    assert heard[1] == chat(engine.text, so_far)


def test_a_second_ctrl_c_ends_the_program(call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGINT during one answer gives exit status 130 and no traceback."""

    def interrupted(engine: Any, ids: Any, params: SamplingParams) -> Iterator[Delta]:
        for delta in stream(engine, ids, params):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            yield delta

    monkeypatch.setattr(chat_command, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    status, _, err = call("chat", talker, *SMALL, "--max-tokens", 40)
    assert (status, err) == (130, "")


# --- signals and pipes ---------------------------------------------------------------------------------------------


def test_sigint_ends_cleanly_and_leaves_a_whole_trace(call: Call, model: Path, tmp_path: Path) -> None:
    """SIGINT in the middle of a run gives exit status 130 and no traceback, and the record so far can be replayed."""
    file = tmp_path / "run.jsonl"
    argv = (*SMALL, "--max-num-seqs", 2, "--max-tokens", 250, "--ignore-eos", "--json")
    many = [x for i in range(60) for x in ("--prompt-ids", f"{i},{i}")]
    process = python("generate", model, *many, *argv, "--record", file)
    until = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size > 20_000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    status, out, err = call("replay", file)
    assert (status, err) == (0, "")


def test_a_reader_that_leaves_is_no_traceback(model: Path) -> None:
    """When nobody reads standard output any more, the exit status is 141 and standard error is silent."""
    read, write = os.pipe()
    os.close(read)
    process = python("generate", model, "--prompt-ids", "1", *SMALL, "--max-tokens", 3, "--json", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


def test_a_full_disk_is_one_line(model: Path) -> None:
    """When standard output can not be written, the exit status is 1 and one line says why."""
    with Path("/dev/full").open("w") as full:
        process = python("plan", model, "--memory-gib", 1, stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "No space left" in one_line(err)


def test_a_record_that_can_not_be_written_is_one_line(call: Call, model: Path) -> None:
    """When the record's disk is full, the run ends with exit status 1 and one line that names the file."""
    status, _, err = call("generate", model, "--prompt-ids", "1", *SMALL, "--max-tokens", 2, "--record", "/dev/full")
    assert status == 1
    assert "--record: /dev/full: No space left" in one_line(err)


def test_help_that_can_not_be_written_is_one_line() -> None:
    """`--help` to a full disk is exit status 1 and one line."""
    with Path("/dev/full").open("w") as full:
        process = python("--help", stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "No space left" in one_line(err)


def test_closed_standard_streams_are_no_traceback(model: Path) -> None:
    """Without a standard output nothing is done, with one line; without a standard error all is done, silently."""
    argv = f"{sys.executable} -m agentinfer generate {model} --prompt-ids 1 --num-blocks 64 --max-tokens 2 --json"
    for closed, expected in ((">&-", (1, "", "agentinfer: standard output is closed\n")), ("2>&-", (0, "{", ""))):
        env = {**os.environ, "PYTHONPATH": str(sources.SRC), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-c", f"{argv} {closed}"], env=env, capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stdout[:1], done.stderr) == expected


def test_an_interrupt_while_the_program_loads_is_no_traceback() -> None:
    """SIGINT while the command line itself is still being imported gives exit status 130."""
    code = """
import signal, sys
class Slow:
    def find_spec(self, name, *_):
        if name == "agentinfer.cli.flags":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Slow())
from agentinfer.cli import main
sys.exit(main(["--help"]))
"""
    env = {**os.environ, "PYTHONPATH": str(sources.SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_error_ends_the_process_with_its_status(model: Path) -> None:
    """`python -m agentinfer` gives the shell the exit status and one line."""
    process = python("plan", model, "--tp", "zero")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "--tp: must be an integer of at least 1, not 'zero'" in one_line(err)


# --- plan, env, demo -----------------------------------------------------------------------------------------------


def test_plan_says_what_fits(call: Call, model: Path) -> None:
    """The table and its JSON hold weights, bytes a token, blocks and the longest context, as computed by hand."""
    status, out, err = call(
        "plan", model, "--memory-gib", 0.5, "--reserve-gib", 0.25, "--kv-utilization", 0.5, "--json"
    )
    assert (status, err) == (0, "")
    found = json.loads(out)
    layer = 48 * (4 + 2 + 2) * 16 + 4 * 16 * 48 + 3 * 48 * 96 + 2 * 48 + 2 * 16
    assert found["num_parameters"] == 2 * layer + 2 * 96 * 48 + 48
    assert found["weights"] == 4 * found["num_parameters"]
    assert found["kv_per_token"] == 2 * 2 * 2 * 16 * 4
    assert found["num_blocks"] == int((0.25 * 2**30 - found["weights"]) * 0.5) // (16 * found["kv_per_token"])
    assert found["longest_context"] == 256
    status, out, _ = call("plan", model, "--memory-gib", 0.5, "--reserve-gib", 0.25, "--kv-utilization", 0.5)
    assert status == 0
    for words in (f"{found['num_blocks']:,}", "512 bytes", "256 tokens", "Qwen3ForCausalLM", "float32"):
        assert words in out


def test_plan_divides_by_tp_and_dtype(call: Call, model: Path) -> None:
    """Two devices hold half the KV of a token each, and half-precision halves it again."""
    _, out, _ = call("plan", model, "--memory-gib", 1, "--tp", 2, "--dtype", "bfloat16", "--json")
    assert json.loads(out)["kv_per_token"] == 2 * 2 * 1 * 16 * 2


def test_plan_says_when_nothing_fits(call: Call, model: Path) -> None:
    """A model that does not fit is a table that says so, and no error."""
    status, out, _ = call("plan", model, "--memory-gib", 1, "--reserve-gib", 1)
    assert status == 0
    assert "does not fit" in out
    status, out, _ = call(
        "plan", model, "--reserve-gib", 0, "--kv-utilization", 1, "--memory-gib", (222_400 + 90_000) / 2**30
    )
    assert status == 0
    assert re.search(r"too small +for 256 tokens: --max-model-len \d+ fits", out)


def test_plan_takes_this_machines_memory(call: Call, model: Path) -> None:
    """Without --memory-gib the memory is that of this machine."""
    status, out, _ = call("plan", model, "--json")
    assert status == 0
    assert json.loads(out)["memory"] > 2**28


@pytest.mark.parametrize("flags", [(), ("--kv-gib", 0.5)])
def test_plan_on_a_cpu_says_what_the_engine_does(call: Call, model: Path, flags: tuple[object, ...]) -> None:
    """Without a GPU and --memory-gib the plan is that of the engine here: 2 GiB of KV, or --kv-gib."""
    status, out, _ = call("plan", model, *flags)
    assert status == 0
    blocks = (int(2**30 * flags[1]) if flags else 2**31) // (16 * 512)
    assert f"{blocks:,}, {16 * blocks:,} tokens: {flags[1] if flags else 2} GiB" in out
    assert ("--kv-gib gives more" in out) == (not flags)


def test_a_length_that_kv_decides_is_said_once(call: Call, model: Path) -> None:
    """KV too small for the model's longest length is one line that names flags, and no error; a length asked for is."""
    small = ("generate", model, "--prompt-ids", "1", "--max-tokens", 2, "--kv-gib", 3 * 8192 / 2**30, "--json")
    status, out, err = call(*small)
    assert (status, len(objects(out))) == (0, 1)
    assert "--max-model-len is 48, all that KV has room for" in one_line(err)
    assert "--kv-gib" in err
    status, _, err = call(*small, "--max-model-len", 49)
    assert status == 2
    assert re.search(r"agentinfer: --kv-gib: .* Lower --max-model-len, or raise --kv-gib$", one_line(err))


def test_env_says_what_is_there(call: Call) -> None:
    """Versions, devices, providers, who computes each op and why, and where caches are."""
    status, out, err = call("env", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert list(found) == ["versions", "devices", "providers", "ops", "caches"]
    assert found["versions"]["torch"].startswith("2.")
    assert {
        "reference", "triton", "persistent", "vllm", "flash-attn", "torch", "fa3-mla", "flashmla", "vllm-moe",
    } == set(found["providers"])  # fmt: skip
    for name in ("fa3-mla", "flashmla", "vllm-moe"):  # asked of a model that they are for
        assert found["providers"][name].startswith("can not be used: vllm is not installed")
    assert {"norm_qkv", "attend", "rms_norm", "paged_attention", "sample"} <= set(found["ops"])
    status, out, _ = call("env")
    assert status == 0
    assert "  reference: the device is a CPU\n    " in out
    assert all(len(line) <= 110 for line in out.splitlines() if "/" not in line)


def test_the_demo_shows_an_answer_and_a_batch(call: Call, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo streams an answer and shows eight more with tokens/s, blocks and prefix hits."""
    monkeypatch.setattr("agentinfer.cli.demo.demo_folder", lambda **_: talker)
    monkeypatch.setattr("agentinfer.cli.demo.open_engine", lambda folder: open_engine(folder, Settings(num_blocks=64)))
    question = "why is the sky blue?"
    (expected,) = answers(talker, [[say("user", question)]], 5)
    status, out, err = call("demo", "--question", question, "--max-tokens", 5)
    assert (status, err) == (0, "")
    assert f"> {question}\n\n{expected}\n" in out
    assert "40 tokens at most\n" in out
    assert len(re.findall(r"^  [1-8]  ", out, re.MULTILINE)) == 8
    assert re.search(r"\d+ tokens in \d+ steps and [\d.]+ s: [\d.]+ tokens/s together", out)
    prompt = len(chat(open_engine(talker, Settings(num_blocks=64)).text, [say("user", question)]))
    hits = 8 * ((prompt - 1) // 16 * 16)
    assert hits > 0
    assert f"prefix hits: {hits} of {8 * prompt} prompt tokens" in out
    shared = (prompt - 1) // 16
    assert re.search(rf"blocks: \d+ of 64 in use at most, {shared} of them shared", out)


def test_the_demo_model_that_can_not_be_had_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network for the demo model gives exit status 2 and one line."""

    def fail(*_: object, **__: object) -> Path:
        raise AgentInferError("no network\nat all")

    monkeypatch.setattr("agentinfer.find.ensure_demo", fail)
    for command in (("demo",), ("generate", "demo", "--prompt", "x"), ("plan", "demo")):
        status, out, err = call(*command)
        assert (status, out) == (2, "")
        assert "demo: no network at all" in one_line(err)


def test_who_watches_is_told_that_a_model_is_opened(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal, and nowhere else, one line says that the model is being opened."""
    argv = ("generate", model, "--prompt-ids", "1", *SMALL, "--max-tokens", 1)
    assert call(*argv)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert one_line(call(*argv)[2]) == f"agentinfer: opening {model}\n"


def test_a_fault_of_a_file_names_it_once(call: Call, tmp_path: Path) -> None:
    """An error that begins with the model's path does not say it twice."""
    _, _, err = call("generate", f"{tmp_path}/", "--prompt-ids", "1")
    assert one_line(err) == f"agentinfer: {tmp_path}/config.json: missing\n"


def test_interrupts_and_settings_go_back(call: Call, model: Path, tmp_path: Path) -> None:
    """A command leaves the process as it found it: its signal handler and its record are put away."""
    before = signal.getsignal(signal.SIGINT)
    file = tmp_path / "run.jsonl"
    assert call("generate", model, "--prompt-ids", "1", *SMALL, "--max-tokens", 1, "--record", file, "--json")[0] == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert gc.get_freeze_count() == 0
