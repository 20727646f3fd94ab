"""An engine whose weights stay in 8 bits: the tokens of one that multiplied them out, half the memory, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

import deepseeks
import sources
from agentinfer.build import Settings
from agentinfer.cli import main
from agentinfer.errors import InvalidSetting
from agentinfer.loop import generate, open_engine
from agentinfer.models.weights import tree_leaves
from agentinfer.state.request import SamplingParams
from agentinfer.swap import swap_weights
from models.test_eight_bits import CONFIG, HELD

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = [[5, 3], [11, 9, 7], [10] * 9]
NATIVE = Settings(fp8="native", num_blocks=40, block_size=4, max_num_batched_tokens=16, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    packed = {}
    for key, x in deepseeks.tensors_of(CONFIG, root).items():
        packed[key] = x
        if any(part in key for part in HELD):
            packed[key], packed[key + "_scale_inv"] = deepseeks.in_8_bits(x)
    return deepseeks.write(root, CONFIG, packed)


def test_tokens(folder: Path) -> None:
    """Greedy tokens are those of the engine that multiplied the weights out; other weights can take their place."""
    native, plain = (open_engine(folder, evolve(NATIVE, fp8=fp8)) for fp8 in ("native", "dequantize"))
    want = [r.output_ids for r in generate(plain, PROMPTS, GREEDY)]
    assert [r.output_ids for r in generate(native, PROMPTS, GREEDY)] == want
    small = sum(x.nbytes for x in tree_leaves(native.machine.weights) if x.dtype == torch.float8_e4m3fn)
    assert small > 1 << 20
    swap_weights(native, {k: -x for k, x in deepseeks.tensors_of(CONFIG, folder).items()})
    assert [r.output_ids for r in generate(native, PROMPTS, GREEDY)] != want
    swap_weights(native, folder)
    assert [r.output_ids for r in generate(native, PROMPTS, GREEDY)] == want


def test_refusals(folder: Path, tmp_path: Path) -> None:
    """A setting that does not exist, a checkpoint of wide weights and compiled layers are refused by the field."""
    with pytest.raises(InvalidSetting, match="fp8: 'int4' is none of dequantize, native"):
        Settings(fp8="int4")
    with pytest.raises(InvalidSetting, match="fp8: native: DeepseekV3ForCausalLM"):
        open_engine(deepseeks.write(tmp_path), NATIVE)
    with pytest.raises(InvalidSetting, match="compile: "):
        open_engine(folder, evolve(NATIVE, compile=True))
    assert open_engine(folder, evolve(NATIVE, dummy_weights=True)).machine.model.fp8 == "native"


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate --fp8 native` answers, `plan --fp8 native` says what DeepSeek-V3 takes, little more than a byte a
    number, and a model of wide weights is refused in one line.
    """
    argv = ["generate", str(folder), "--prompt-ids", "5,3", "--max-tokens", "2", "--num-blocks", "40", "--json"]
    for fp8 in ("native", "dequantize"):
        assert main([*argv, "--fp8", fp8]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()
    assert json.loads(first)["output_ids"] == json.loads(second)["output_ids"]
    v3 = sources.ROOT / "configs" / "DeepSeek-V3"
    assert main(["plan", str(v3), "--memory-gib", "141", "--tp", "8", "--fp8", "native", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fp8"], plan["num_blocks"] > 0) == ("native", True)
    assert 671e9 / 8 < plan["weights"] < 1.1 * 671e9 / 8
    assert main(["plan", str(folder), "--memory-gib", "1", "--fp8", "native"]) == 0
    assert "they are held so" in capsys.readouterr().out
    assert main(["plan", str(sources.ROOT / "configs" / "Qwen3-8B"), "--fp8", "native", "--memory-gib", "8"]) == 2
    assert "--fp8: native: Qwen3ForCausalLM" in capsys.readouterr().err
