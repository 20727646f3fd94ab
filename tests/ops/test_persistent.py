"""The persistent kernel, run on a CPU thread by thread, against the reference ops in float32."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

import emulated
from agentinfer.errors import InvalidSetting
from agentinfer.models import dense
from agentinfer.ops import persistent
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import alone
from gpu_shapes import SHAPES
from row_steps import Case, case, check, inputs

CPU = torch.device("cpu")
each_compiler = pytest.mark.parametrize("compiler", emulated.COMPILERS)


@frozen(eq=False)
class Emulated:
    case: Case
    library: Any
    params: Any
    mailbox: persistent.Mailbox


def emulate(
    x: Case, compiler: str, folder: Path, *, grid: int, slot: int = 8192, shared: int = 98304, **changes: int
) -> Emulated:
    """The kernel for *x* on so many multiprocessors."""
    values = persistent.macros(x.weights, dense.local_heads(x.config, 1), grid, shared, {"SLOT": slot, **changes})
    library = emulated.build(compiler, folder, values)
    mailbox = persistent.new_mailbox(values, CPU)
    assert library.num_boxes() == len(mailbox.boxes)
    params = persistent.new_params(x.weights, mailbox, x.config.norm_eps, x.config.scale, 10**9, 0)
    return Emulated(x, library, params, mailbox)


def stepped(x: Emulated, token: int, position: int, seed: int = 0) -> Tensor:
    at, kv = inputs(x.case.kv, token, position)
    logits = torch.zeros(1, x.case.config.vocab_size)
    persistent.fill(x.params, kv.layers, at, logits)
    emulated.run(x.library, x.params, seed)
    return logits


@each_compiler
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[] if shape == "qwen3" else pytest.mark.slow) for shape in sorted(SHAPES)]
)
def test_logits_and_keys_are_the_reference_s(tmp_path: Path, compiler: str, shape: str) -> None:
    """Steps one after the other: without keys, with few, and with more than a slot of the ring holds."""
    x = emulate(case(tmp_path, CPU, **SHAPES[shape]), compiler, tmp_path, grid=9)
    for seed, position in enumerate((0, 1, 5, 400)):
        check(x.case, stepped(x, 17 * seed + 1, position, seed), 17 * seed + 1, position)
    assert x.mailbox.control.tolist() == [4, 0, 0, 0]


WIDE = {
    "eight warps a row, uneven chunks": {
        "hidden_size": 264, "intermediate_size": 4104, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128,
    },
    "four warps a row, uneven chunks": {
        "hidden_size": 3592, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "two warps a row, groups of 7": {
        "hidden_size": 2304, "intermediate_size": 256, "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "eight warps a row, whole chunks, groups of 16": {
        "hidden_size": 4096, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 1,
    },
}  # fmt: skip


@pytest.mark.slow
@each_compiler
@pytest.mark.parametrize("shape", sorted(WIDE))
def test_wide_models(tmp_path: Path, compiler: str, shape: str) -> None:
    """Rows that several warps share, heads that do, and more splits than warps."""
    x = case(tmp_path, CPU, 64, num_hidden_layers=1, vocab_size=300, **WIDE[shape])
    for changes in ({}, {"FIRST": 0, "TICKS": 1}):
        check(x, stepped(emulate(x, compiler, tmp_path, grid=20, slot=16384, shared=131072, **changes), 5, 700), 5, 700)


@each_compiler
def test_a_lost_packet_fails_its_step_and_no_other(tmp_path: Path, compiler: str) -> None:
    """Whatever is lost: no logit of that step is a number, the step ends, it is told where it waited, and the next one
    is sound.
    """
    x = emulate(case(tmp_path, CPU, num_hidden_layers=1, vocab_size=300), compiler, tmp_path, grid=5)
    x.params.limit_ns = 2000  # of the emulation's time: passes over the grid
    for phase, name in enumerate(persistent.PHASES[1:], 1):
        x.params.lose = phase
        x.mailbox.control[2] = 0
        assert stepped(x, 3, 40, seed=phase).isnan().all()
        assert (persistent.where_late(x.mailbox) or "").endswith(name)
    x.params.lose, x.params.limit_ns = 0, 10**9
    x.mailbox.control[2] = 0
    check(x.case, stepped(x, 3, 40), 3, 40)
    assert persistent.where_late(x.mailbox) is None


def weights_of(hidden: int, inter: int, layers: int = 2, vocab: int = 1000) -> Any:
    """Weights without memory, as far as their shapes matter."""
    down = torch.empty(hidden, inter, device="meta")
    table = torch.empty(vocab, hidden, device="meta")
    return SimpleNamespace(embed=table, head=table, layers=[SimpleNamespace(down=down)] * layers)


QWEN3_8B = (weights_of(4096, 12288, 36, 151936), HeadShape(32, 8, 128))
QWEN3_06B = (weights_of(1024, 3072, 28, 151936), HeadShape(16, 8, 128))


@pytest.mark.parametrize(
    ("hidden", "inter", "heads", "windows", "ranks", "message"),
    [
        (4096, 12290, HeadShape(32, 8, 128), None, 1, "intermediate_size 12290 is no multiple of 8"),
        (32, 128, HeadShape(4, 2, 64), None, 1, "hidden_size 32"),
        (8192, 28672, HeadShape(64, 8, 128), None, 1, "intermediate_size 28672"),
        (12288, 12288, HeadShape(96, 96, 128), None, 1, "96 heads of 128 are too many for 132 multiprocessors"),
        (4096, 12288, HeadShape(32, 8, 128), 4096, 1, "no sliding windows yet"),
        (4096, 12288, HeadShape(32, 8, 128), None, 2, "one rank only, not 2"),
    ],
)
def test_models_without_a_program_are_refused(
    hidden: int, inter: int, heads: HeadShape, windows: int | None, ranks: int, message: str
) -> None:
    """With the size that does not fit, and before anything is compiled."""
    w = weights_of(hidden, inter)
    assert message in (persistent.unfit(w, heads, [None, windows], ranks, 132) or "")
    group = SimpleNamespace(size=ranks)
    kernel = persistent.RowKernel(132, 1, 0, {})
    with pytest.raises(InvalidSetting, match=f"ops: persistent: {message}"):
        kernel(w, heads, [None, windows], 1e-6, 1.0, group, (), None)


def test_models_with_a_program() -> None:
    """Slots hold whole rows; the keys are split over all multiprocessors."""
    for (w, heads), slot, splits in ((QWEN3_8B, 24576, 16), (QWEN3_06B, 32768, 16)):
        assert persistent.unfit(w, heads, [None], alone(CPU).tp.size, 132) is None
        values = persistent.macros(w, heads, 132)
        assert (values["SLOT"], values["SPLITS"]) == (slot, splits)


@pytest.mark.parametrize("compiler", emulated.NVCC)
@pytest.mark.parametrize("model", [QWEN3_8B, QWEN3_06B])
def test_it_compiles_for_hopper_into_registers(tmp_path: Path, compiler: str, model: tuple[Any, HeadShape]) -> None:
    """Nothing spills at the shapes that were measured, and nothing is kept in local memory."""
    macros = [f"-D{name}={value}" for name, value in persistent.macros(*model, 132).items()]
    command = [compiler, "-std=c++17", "-arch=sm_90a", "--use_fast_math", "-cubin", "-Xptxas", "-v", *macros]
    source = emulated.SOURCES / "step.cu"
    done = subprocess.run(
        [*command, source, "-o", "out.cubin"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
