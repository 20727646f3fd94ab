"""Compile mode on a GPU: layers fused by inductor around attention that is one operator."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch._dynamo.utils import counters

from agentinfer.build import Settings
from agentinfer.errors import InvalidSetting
from agentinfer.loop import Engine, generate, open_engine
from agentinfer.models.model import kv_layout
from agentinfer.ops import norm
from agentinfer.ops.compiled import own, rounding
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.ops.provide import reference
from agentinfer.state.request import SamplingParams
from agentinfer.steps import prefill_step

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # inductor's of torch itself
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),  # float32 is float32 here
]
Folder = Callable[[str, str], Path]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SMALL = Settings(
    device="cuda", num_blocks=600, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, seed=0, compile=True
)


def compilations() -> int:
    """By this process until now."""
    return int(counters["stats"]["unique_graphs"])


def tokens(engine: Engine, count: int = 8) -> list[tuple[int, ...]]:
    """Greedy ones of *count* random prompts that fit in one step, so that all rows decode together to the end."""
    rng = random.Random(3)
    asked = [[rng.randrange(1000) for _ in range(rng.choice((1, 2, 5, 17, 30)))] for _ in range(count)]
    results = generate(engine, asked, GREEDY, progress=False)
    assert [r.error for r in results] == [None] * count
    return [r.output_ids for r in results]


def logits(engine: Engine, counts: list[int]) -> Tensor:
    """[positions, V] of rows that begin, then of one more token each."""
    m, device = engine.machine, engine.machine.ranks.device
    per_row = 1 + max(counts) // m.limits.block_size
    layouts = kv_layout(m.model, 1, m.limits.block_size)
    kv = allocate(layouts, per_row * len(counts), len(counts), per_row, device)
    blocks = [list(range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(len(counts))]
    x, kv = by_hand(kv, [[(7 * i + at) % 1000 for at in range(n)] for i, n in enumerate(counts)], [0] * len(counts),
                    blocks, every=True)  # fmt: skip
    first, kv = prefill_step(m, kv, x)
    x, kv = by_hand(kv, [[i + 3] for i in range(len(counts))], counts, blocks)
    return torch.cat((first, prefill_step(m, kv, x)[0]))


@pytest.mark.parametrize("shape", ["qwen3", "qwen2 with biases"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_logits_and_two_compilations(tiny_folder: Folder, shape: str, dtype: str, limit: float) -> None:
    """Prompts of all lengths and decodes of all batches are near the reference over the same weights, in the two
    compilations that were made at the start.
    """
    folder, before = tiny_folder(shape, dtype), compilations()
    engine = open_engine(folder, evolve(SMALL, dtype=dtype))
    assert compilations() - before == 2
    plain = open_engine(folder, evolve(SMALL, dtype=dtype, compile=False, eager=True, ops="reference"))
    assert plain.machine.ops.name == reference().name
    for counts in [[n] for n in (1, 2, 5, 17, 64)] + [[1] * n for n in (1, 2, 3, 7, 8)] + [[5, 1, 17, 64]]:
        got, want = logits(engine, counts), logits(plain, counts)
        assert float((got - want).norm() / want.norm()) < limit, counts
    tokens(engine)
    assert compilations() - before == 2


@pytest.mark.parametrize("ops", ["auto", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_and_not_they_choose_the_same_tokens(tiny_folder: Folder, dtype: str, ops: str) -> None:
    """8 rows, which are a bucket: compiled layers replayed in graphs and called one by one give the same tokens, and in
    float32 those of the engine that is not compiled, near ties aside.
    """
    folder = tiny_folder("qwen3", dtype)
    captured = open_engine(folder, evolve(SMALL, dtype=dtype, ops=ops))
    called = open_engine(folder, evolve(SMALL, dtype=dtype, ops=ops, eager=True))
    assert captured.machine.replay is not None
    assert called.machine.replay is None
    got = tokens(captured)
    assert got == tokens(called)
    if dtype == "float32":
        plain = tokens(open_engine(folder, evolve(SMALL, dtype=dtype, ops=ops, compile=False)))
        assert sum(a == b for a, b in zip(got, plain, strict=True)) >= 7


def test_providers_without_an_operator_are_refused(tiny_folder: Folder) -> None:
    """The reference waits for the host on a GPU, so its layers can not be compiled there."""
    with pytest.raises(InvalidSetting, match=r"^compile: "):
        open_engine(tiny_folder("qwen3", "bfloat16"), evolve(SMALL, ops="reference"))


def _ulps(a: Tensor, b: Tensor) -> int:
    places = [x.contiguous().view(torch.int16).to(torch.int32) for x in (a, b)]
    ordered = [torch.where(x < 0, -32768 - x, x) for x in places]
    return int((ordered[0] - ordered[1]).abs().max())


def test_norms_in_bfloat16_are_eager_norms() -> None:
    """Compiled by inductor in at most two compilations, a norm differs from the eager one by at most one step of the
    last place.
    """
    function, before = own(norm.fused_add_rms_norm), compilations()
    compiled_norm = torch.compile(function, fullgraph=True, dynamic=False, options=rounding("inductor"))
    weight = torch.randn(1024, device="cuda").bfloat16()
    for n in (1, 2, 3, 7, 8, 5, 17, 64):
        x, residual = (torch.randn(n, 1024, device="cuda").bfloat16() for _ in range(2))
        for tensor in (x, residual):
            torch._dynamo.mark_dynamic(tensor, 0)
        got, want = compiled_norm(x, residual, weight, 1e-6), norm.fused_add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(got[1], want[1])
        assert _ulps(got[0], want[0]) <= 1
    assert compilations() - before <= 2
