"""Settings.compile: an engine whose layers are one compiled function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from agentinfer import build
from agentinfer.build import Settings, compiled
from agentinfer.cli.flags import make_parser
from agentinfer.cli.opened import settings_of
from agentinfer.errors import InvalidSetting
from agentinfer.loop import Engine, generate, open_engine, start
from agentinfer.ops.custom import opaque_ops
from agentinfer.ops.provide import Ops, reference
from agentinfer.state.request import SamplingParams
from compilers import COMPILERS, counting
from tiny import write_tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [[first] * (3 * i + 1) + [7, 8, 9] for i, first in enumerate((2, 2, 5, 5, 5, 6, 8, 8))]
SMALL = Settings(num_blocks=80, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def wrapped(engine: Engine, backend: Any, ops: Ops) -> Engine:
    """A new engine over the same weights, with *ops*, compiled by *backend*."""
    layouts = tuple(layer.layout for layer in engine.world.device.kv.layers)
    m = compiled(evolve(engine.machine, ops=ops), layouts, backend)
    return start(m, build.new_device(m.limits, layouts, torch.device("cpu")))


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    results = generate(engine, PROMPTS, GREEDY, progress=False)
    assert [r.error for r in results] == [None] * len(PROMPTS)
    return [r.output_ids for r in results]


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_eager_tokens_and_nothing_is_compiled_after_the_start(folder: Path, overlap: bool) -> None:
    """Prompts in chunks, mixed batches and decodes of a whole engine run in the two compilations made at its start,
    under no_grad or not, and give the tokens of the reference.
    """
    eager = open_engine(folder, evolve(SMALL, overlap=overlap))
    counter = counting("aot_eager")
    engine = wrapped(eager, counter, opaque_ops())
    assert counter.frame_count == 2
    want = tokens(eager)
    assert tokens(engine) == want
    with torch.no_grad():
        assert tokens(engine) == want
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", *COMPILERS])
def test_the_setting_compiles_the_machine(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings(compile=True) opens an engine over ops that can be traced, compiled at its start; it is off unless asked
    for.
    """
    counter = counting(backend)
    monkeypatch.setattr(build, "compiled", partial(compiled, backend=counter))
    assert open_engine(folder, SMALL).machine.ops.name == "reference"
    assert counter.frame_count == 0
    engine = open_engine(folder, evolve(SMALL, compile=True))
    assert engine.machine.ops.traced is not None
    assert counter.frame_count == 2
    assert tokens(engine) == tokens(open_engine(folder, SMALL))


def test_a_compiler_that_fails_is_told_at_start(folder: Path) -> None:
    """What torch.compile raises refuses the setting, with its reason, before any request is served."""

    def broken(graph: torch.fx.GraphModule, _: object) -> object:
        raise RuntimeError("no such register")

    with pytest.raises(InvalidSetting, match=r"^compile: torch.compile failed: .*no such register"):
        wrapped(open_engine(folder, SMALL), broken, opaque_ops())


def test_ops_that_can_not_be_traced_are_refused(folder: Path) -> None:
    """Ops that have no traced attention are no setting for compile, by name and by value."""
    with pytest.raises(InvalidSetting, match=r"^compile: reference: "):
        wrapped(open_engine(folder, SMALL), "aot_eager", reference())
    with pytest.raises(InvalidSetting, match=r"^compile: reference: "):
        build.build(folder, evolve(SMALL, compile=True), (), ops=reference())


def test_the_flag_stands_beside_eager() -> None:
    """--compile is off unless given, and each command that opens an engine has it."""
    for command in (["generate", "m", "--prompt", "x"], ["chat", "m"], ["bench", "latency", "m"]):
        assert settings_of(make_parser().parse_args(command)).compile is False
        given = settings_of(make_parser().parse_args([*command, "--compile", "--eager"]))
        assert (given.compile, given.eager) == (True, True)
