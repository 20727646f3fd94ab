"""The operators of attention on a GPU, interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import astuple
from torch import Tensor

from agentinfer.ops import attention, custom_gpu, provide, vllm_ops
from agentinfer.ops.attention import HeadShape, values_of
from ops.ragged import EPS, SCALE, Case, case

SHAPE = HeadShape(6, 2, 64)


@pytest.fixture
def step() -> Case:
    return case([1, 20, 3], [40, 20, 30], SHAPE, 16)


def arguments(x: Case, q: Tensor, window: int) -> tuple[Any, ...]:
    """Of attend_work."""
    rows = custom_gpu.rows_of(x.x, SHAPE, torch.float32, 16, fa3=False)
    work = rows.work
    assert work is not None
    return (q, x.layer.k, values_of(x.layer), rows.table, work.chunks, list(astuple(work.chunk)), work.singles,
            list(astuple(work.single)), SCALE, window)  # fmt: skip


def test_opcheck(step: Case) -> None:
    """Schemas, fake kernels and aliasing are right: the write mutates the two caches and nothing else."""
    k, v = (plane.nan_to_num(0.5) for plane in (step.layer.k, values_of(step.layer)))
    args = (step.qkv, k, v, step.x.positions, step.x.slots, 6, step.table, step.q_norm, step.k_norm, EPS)
    torch.library.opcheck(custom_gpu.qk_rope_write_op, args)
    torch.library.opcheck(custom_gpu.qk_rope_write_op, (*args[:7], None, None, EPS))
    q = torch.zeros(len(step.qkv), 6, 64)
    for window in (0, 9):
        _, *rest = arguments(step, q, window)
        torch.library.opcheck(custom_gpu.attend_work, (q, k, v, *rest[2:]))


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


def test_attention_is_one_graph_of_operators(step: Case) -> None:
    """torch.compile traces attend_opaque whole, and its result is the eager one."""
    rows = custom_gpu.rows_of(step.x, SHAPE, torch.float32, 16, fa3=False)

    def layer(qkv: Tensor) -> Tensor:
        return custom_gpu.attend_opaque(
            qkv * 2, step.layer, rows, SHAPE, step.table, step.q_norm, step.k_norm, EPS, SCALE, None
        ) + 1  # fmt: skip

    want = layer(step.qkv)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(step.qkv)
    torch.testing.assert_close(got, want)
