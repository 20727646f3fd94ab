"""The operators of attention on a GPU, interpreted on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import astuple, evolve

import tiny
from agentinfer.models.model import Model, kv_layout, load_model
from agentinfer.ops import attention, custom_gpu, provide, vllm_ops
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.comm import alone
from agentinfer.ops.compiled import compiled_layer
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.ops.provide import Ops
from agentinfer.ops.ragged import work_of
from compilers import counting
from ops.ragged import EPS, SCALE, Case, case

SHAPE = HeadShape(6, 2, 64)


@pytest.fixture
def step() -> Case:
    return case([1, 20, 3], [40, 20, 30], SHAPE, 16)


def caches(x: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies without NaN, which opcheck would take for a difference."""
    return x.layer.k.nan_to_num(0.5), values_of(x.layer).nan_to_num(0.5)


def test_opcheck(step: Case) -> None:
    """Schemas, fake kernels and aliasing are right: the write mutates the two caches and nothing else."""
    k, v = caches(step)
    args = (step.qkv, k, v, step.x.positions, step.x.slots, 6, step.table, step.q_norm, step.k_norm, EPS)
    torch.library.opcheck(custom_gpu.qk_rope_write_op, args)
    torch.library.opcheck(custom_gpu.qk_rope_write_op, (*args[:7], None, None, EPS))
    q, work = torch.zeros(len(step.qkv), 6, 64), work_of(step.x, SHAPE, torch.float32, 16)
    sizes = (list(astuple(work.chunk)), list(astuple(work.single)))
    for window in (0, 9):
        tiles = (work.chunks, sizes[0], work.singles, sizes[1])
        torch.library.opcheck(custom_gpu.attend_work, (q, k, v, step.x.table, *tiles, SCALE, window))


@pytest.mark.parametrize("counts", [[1, 20, 3], [1, 1, 1]])
def test_opcheck_of_a_whole_step(counts: list[int]) -> None:
    """So are those of attention of any step, by tiles and by the decode kernel, which leaves its counters at 0."""
    step = case(counts, [40, 20, 30], SHAPE, 16)
    k, v = caches(step)
    made = custom_gpu.traced_step(step.x, step.layer, SHAPE, fa3=False)
    args = (step.qkv, k, v, made.positions, made.slots, *made.rows, 6, step.table, step.q_norm, step.k_norm, EPS, SCALE)
    for window in (0, 9):
        torch.library.opcheck(custom_gpu.attend_step, (*args, window))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("fa3", [False, True])
def test_the_operators_attend_as_the_reference(
    step: Case, fa3: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed step through the operators has the reference's result, by our tiles and by FlashAttention-3 (played by
    the reference).
    """

    def played(q, k, v, table, ends, context, max_query, max_context, scale, window):
        lengths = attention.RowLengths(ends.diff().tolist(), context.tolist(), [False] * len(context))
        index = attention.attention_index(table, lengths, k.shape[1], window, q.dtype)
        return attention.attend_index(q, k, v, index, scale)

    monkeypatch.setattr(vllm_ops, "attend_fa3", played)
    monkeypatch.setattr(vllm_ops, "load_attention", lambda: None)
    got, cache = step.attend(custom_gpu.opaque_gpu_ops(fa3=fa3).attend, window)
    want, wanted = step.attend(provide.attend_reference, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.k[1:], wanted.k[1:], rtol=1e-5, atol=1e-5, equal_nan=True)


class Run:
    """A model over KV of its own, 4 rows of 3 blocks."""

    def __init__(self, model: Model, weights: Any, ops: Ops) -> None:
        self.model, self.weights, self.ops = model, weights, ops
        self.kv = allocate(kv_layout(model, 1, 16), 12, 4, 3, torch.device("cpu"))

    def step(self, counts: list[int], start: list[int]) -> torch.Tensor:
        """Logits of all positions."""
        blocks = [list(range(1 + 3 * i, 4 + 3 * i)) for i in range(len(counts))]
        x, kv = by_hand(self.kv, [list(range(at, at + n)) for at, n in zip(start, counts, strict=True)], start, blocks,
                        every=True)  # fmt: skip
        logits, self.kv = self.model.forward(self.model.config, self.weights, self.ops, alone(), kv, x)
        return logits


def test_layers_over_these_operators_compile_twice(tmp_path: Path) -> None:
    """Prompts by tiles of both kinds and decodes by their kernel are one case to the compiler: one compilation for one
    position, one for several, and the numbers of the same ops run eagerly.
    """
    config = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model, weights = load_model(tiny.write_tiny(tmp_path, **config), None, alone())
    counter, ops = counting("aot_eager"), custom_gpu.opaque_gpu_ops(fa3=False)
    assert ops.traced is not None
    wrap = partial(compiled_layer, traced=ops.traced, shape=model.heads(model.config, 1), backend=counter)
    runs = [
        Run(evolve(model, forward=model.forward_through(wrap)), weights, ops),
        Run(model, weights, ops),
        Run(model, weights, provide.reference()),
    ]
    steps = [
        ([17], [0]),
        ([1], [17]),
        ([1, 3, 20], [18, 0, 0]),
        ([1, 1], [19, 3]),
        ([2], [20]),
        ([1, 1, 1], [22, 4, 20]),
    ]
    for counts, start in steps:
        mine, eager, want = (run.step(counts, start) for run in runs)
        assert torch.equal(mine, eager)
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 2
