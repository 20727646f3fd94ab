"""Whole tiny models with our kernels' Ops, in Triton's interpreter, against the reference."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from agentinfer.errors import InvalidSetting
from agentinfer.models.model import Model, kv_layout, load_model
from agentinfer.ops import norm, provide
from agentinfer.ops.comm import Group, Ranks, alone
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kernels.launch import launches_dependents
from agentinfer.ops.kernels.tiles import GemvTile
from agentinfer.ops.kv import KvLayout, allocate, gqa
from agentinfer.ops.provide import Ops
from agentinfer.ops.sample import sample
from agentinfer.ops.threads import Threads
from agentinfer.ops.triton_ops import triton_ops
from agentinfer.state.columns import PARAMS
from agentinfer.state.plan import SamplingColumns

CPU = torch.device("cpu")
SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 91,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "qwen3-tied": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_size": 192},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 2,
              "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 192},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 3,
              "num_key_value_heads": 1, "hidden_size": 192, "attention_bias": True, "mlp_bias": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays by the program, so tiles are large here; those of a GPU are tested with their kernel."""
    from agentinfer.ops.kernels import gemv

    monkeypatch.setattr(gemv, "gemv_tile", lambda n, k, gated: GemvTile(32, 64, 1))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kv_of(dim: int) -> KvLayout:
    return gqa(16, 1, dim, torch.float32)


class Run:
    """A model over poisoned KV of its own: row i + 1 has every third block from i + 1 on."""

    def __init__(self, ops: Ops, model: Model, weights: Any, ranks: Ranks) -> None:
        self.ops, self.model, self.weights, self.ranks = ops, model, weights, ranks
        self.kv = allocate(kv_layout(model, ranks.tp.size, 16), 12, 3, 4, CPU, math.nan)
        self.length = [0, 0, 0]

    def step(self, work: Mapping[int, Sequence[int]], *, every: bool = False) -> Tensor:
        """Row -> its next tokens; the logits of the last position of each, or of *every* one."""
        rows = list(work)
        x, kv = by_hand(
            self.kv, [list(work[row]) for row in rows], [self.length[row] for row in rows],
            [[1 + row + 3 * i for i in range(4)] for row in rows], [row + 1 for row in rows], every=every,
        )  # fmt: skip
        logits, self.kv = self.model.forward(self.model.config, self.weights, self.ops, self.ranks, kv, x)
        for row in rows:
            self.length[row] += len(work[row])
        return logits


STEPS: Sequence[Mapping[int, Sequence[int]]] = (
    {0: range(7), 1: range(20, 21), 2: range(30, 47)},  # chunks and a single query
    {1: [5]},  # one row
    {0: [1], 1: [2], 2: [3]},  # three rows
)


def compare(a: Run, b: Run, rtol: float, atol: float) -> None:
    for work in STEPS:
        want = a.step(work).to(torch.float32)
        got = b.step(work)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_models_decode_as_the_reference(name: str, tmp_path: Path) -> None:
    """In float32, chunks, one row and several rows give the reference's logits, step after step."""
    model, weights = load_model(tiny.write_tiny(tmp_path, **{**SHAPE, **CASES[name]}), None, alone())
    runs = [Run(ops, model, weights, alone()) for ops in (provide.reference(), triton_ops(CPU))]
    compare(*runs, rtol=1e-5, atol=1e-4)


def test_half_precision_goes_through_split_products(tmp_path: Path) -> None:
    """In float16 several rows take the descriptor kernel and its partial sums, near the float32 reference."""
    folder = tiny.write_tiny(tmp_path, **{**SHAPE, **CASES["qwen3"], "hidden_size": 128})
    wide, narrow = load_model(folder, torch.float32, alone()), load_model(folder, torch.float16, alone())
    runs = [Run(provide.reference(), *wide, alone()), Run(triton_ops(CPU, gemm_rows=64), *narrow, alone())]
    compare(*runs, rtol=3e-2, atol=3e-2)


def test_positions_that_are_not_sampled(tmp_path: Path) -> None:
    """Logits of every position, and of none, equal the reference."""
    model, weights = load_model(tiny.write_tiny(tmp_path, **{**SHAPE, **CASES["qwen3"]}), None, alone())
    plain, ours = (Run(ops, model, weights, alone()) for ops in (provide.reference(), triton_ops(CPU)))
    work = {0: range(4), 2: range(9)}
    torch.testing.assert_close(ours.step(work, every=True), plain.step(work, every=True), rtol=1e-5, atol=1e-4)
    ops, stream = triton_ops(CPU), provide.Stream(rand(3, 64), None)
    none = torch.zeros(0, dtype=torch.int64)
    assert ops.norm_head(stream, none, torch.ones(64), rand(9, 64), 1e-6, alone().tp, 8).shape == (0, 8)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows one grid at a time, and ranks are threads."""
    from triton.runtime.interpreter import GridExecutor

    lock, plain = threading.Lock(), GridExecutor.__call__

    def alone_in_it(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone_in_it)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_two_ranks_are_one(rows: int, tmp_path: Path) -> None:
    """Two ranks as threads give the logits of one: sums over ranks end in the residual, the vocabulary is gathered."""
    folder = tiny.write_tiny(tmp_path, **{**SHAPE, **CASES["qwen3"]})
    work = {row: [3 + row] for row in range(rows)}
    want = Run(provide.reference(), *load_model(folder, None, alone()), alone()).step(work)

    def rank(group: Group) -> Tensor:
        ranks = Ranks(group, ep=False, device=CPU)
        return Run(triton_ops(CPU), *load_model(folder, None, ranks), ranks).step(work)

    for got in Threads.of(2).run(rank):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gemm_rows", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_layer_is_the_plain_formula(rows: int, gemm_rows: int, dtype: torch.dtype) -> None:
    """Residual, norms, biases, two additions in a row and the head equal the formulas written out."""
    ops, group = triton_ops(CPU, gemm_rows=gemm_rows), alone().tp
    table, out_w, gate_up_w, down_w = (
        (rand(*shape, seed=i) / 8).to(dtype) for i, shape in enumerate([(32, 64), (64, 128), (192, 64), (64, 96)])
    )
    out_b, gate_up_b, n1, n2 = (rand(n, seed=9 + n).to(dtype) for n in (64, 192, 64, 64))
    attn, ids, samples = rand(rows, 128, seed=5).to(dtype), torch.arange(rows) * 5, torch.arange(rows)[-1:]

    stream = ops.embed(ids, table, group)
    stream = ops.out_add(attn, out_w, out_b, stream, group)
    stream = ops.out_add(attn, out_w, None, stream, group)
    act, stream = ops.norm_gate_up(stream, n1, gate_up_w, gate_up_b, 1e-6)
    stream = ops.down_add(act, down_w, None, stream, group)
    logits = ops.norm_head(stream, samples, n2, table, 1e-6, group, 30)

    wide = [x.float() for x in (table, attn, out_w, out_b, n1, gate_up_w, gate_up_b, down_w, n2)]
    table, attn, out_w, out_b, n1, gate_up_w, gate_up_b, down_w, n2 = wide
    h = table[ids] + 2 * (attn @ out_w.t()) + out_b
    want = norm.silu_and_mul(norm.rms_norm(h, n1, 1e-6) @ gate_up_w.t() + gate_up_b)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(act.float(), want, **close)
    want = norm.rms_norm(h + want @ down_w.t(), n2, 1e-6) @ table.t()
    torch.testing.assert_close(logits, want[samples, :30], **close)


def test_sampling_is_the_reference() -> None:
    """Greedy, noisy and filtered samples in one batch are those of the reference."""
    params = np.zeros(4, PARAMS)
    params["temperature"], params["top_p"], params["seed"] = [0, 1, 0.7, 0.9], [1, 1, 1, 0.6], [1, 2, 3, 4]
    params["top_k"][2] = 5
    s = SamplingColumns(params, np.arange(4, dtype=np.int32), ((0, (3, 4)),))
    logits = 3 * rand(4, 50)
    tokens, ok = triton_ops(CPU).sample(logits, s)
    want, fine = sample(logits, s)
    assert torch.equal(tokens, want)
    assert torch.equal(ok, fine)


def test_what_has_no_kernel_is_refused() -> None:
    """Other head dims are refused by name, and so is one norm weight without the other."""
    kv = allocate([kv_of(48)], 2, 1, 2, CPU)
    x, kv = by_hand(kv, [[1]], [0], [[1]])
    shape = provide.HeadShape(2, 1, 48)
    with pytest.raises(InvalidSetting, match="head_dim 48"):
        triton_ops(CPU).attend(rand(1, 4 * 48), kv.layers[0], x, shape, rand(4, 48), None, None, 1e-6, 1.0, None)
    kv = allocate([kv_of(64)], 2, 1, 2, CPU)
    x, kv = by_hand(kv, [[1]], [0], [[1]])
    shape = provide.HeadShape(2, 1, 64)
    with pytest.raises(ValueError, match="both or neither"):
        triton_ops(CPU).attend(rand(1, 256), kv.layers[0], x, shape, rand(4, 64), rand(64), None, 1e-6, 1.0, None)


def test_no_programmatic_launch_off_the_gpu() -> None:
    """A CPU has no programmatic dependent launch."""
    assert not launches_dependents(CPU)
