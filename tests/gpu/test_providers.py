"""Every provider that can work on this GPU, against the reference in float32 over the same rounded numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, fields, has
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.models.model import load_model
from agentinfer.ops import choose, provide
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.choose import Site, chosen, refusal
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Memo
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Attend, Ops, reference
from agentinfer.ops.vllm_ops import attend_fa3, missing, with_fa3
from gpu_shapes import SHAPES
from models.drive import Driver
from ops.ragged import EPS, SCALE, Case, case
from ops.test_vllm_ops import CACHE, DENSE_DECODE, FWD, SMALL

CUDA = torch.device("cuda")
HEADS = {
    "Qwen3-8B": HeadShape(32, 8, 128),
    "Qwen3-0.6B": HeadShape(16, 8, 128),
    "SmolLM2": HeadShape(9, 3, 64),
    "Qwen2-0.5B": HeadShape(14, 2, 64),
}
STEPS = {
    "chunks": ([300, 77, 128], [300, 77, 128]),
    "mixed": ([1, 500, 1, 5, 129, 1], [700, 900, 1, 64, 1300, 1025]),
    "cached prefixes": ([16, 256, 3], [1040, 512, 2000]),
    "decode": ([1, 1, 1], [1, 513, 3000]),
}
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of a key that is normed and rotated: one unit in the last place."""
ROUNDINGS = {"vllm": 2, "flash-attn": 2, "torch": 2}
"""Their norm rounds before their rope does."""
NAMES = ("triton", "auto", "fa3", "vllm", "flash-attn", "torch")


@cache
def provider(name: str, dtype: torch.dtype, shape: HeadShape, block_size: int) -> Ops:
    """The ops of a provider, or the reason to skip. "fa3": decode rows too go to FlashAttention-3."""
    site = Site.of(CUDA, dtype, shape, block_size)
    if name == "fa3":
        problem = refusal("triton", site) or refusal("vllm", site)
        return pytest.skip(problem) if problem else with_fa3(chosen("triton", site)[0], decode_from=0)
    problem = None if name == "auto" else refusal(name, site)
    return pytest.skip(problem) if problem else chosen(name, site)[0]


def as_float(x: Any) -> Any:
    """The same numbers in float32, of a tensor and of all the tensors in a record."""
    if isinstance(x, Tensor):
        return x.float() if x.is_floating_point() else x
    if isinstance(x, tuple):
        return tuple(as_float(part) for part in x)
    if has(type(x)):
        return evolve(x, **{f.name: as_float(getattr(x, f.name)) for f in fields(type(x))})
    return x


def wanted(x: Case, window: int | None) -> tuple[Tensor, LayerKv]:
    """What the reference makes of the case in float32."""
    layer = LayerKv(0, x.layer.layout, x.layer.k.float(), values_of(x.layer).float())
    norms = {"q_norm": as_float(x.q_norm), "k_norm": as_float(x.k_norm)}
    return evolve(x, layer=layer, qkv=x.qkv.float(), **norms).attend(provide.attend_reference, window)


def check(x: Case, op: Attend, window: int | None, *, roundings: int = 1) -> None:
    """The result within the tolerance of its dtype, every key within one unit in the last place for each rounding on
    its way, nothing else written.
    """
    dtype = x.qkv.dtype
    got, cache_ = x.attend(op, window)
    want, wanted_ = wanted(x, window)
    torch.testing.assert_close(got.float(), want, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    for mine, theirs in ((cache_.k, wanted_.k), (values_of(cache_), values_of(wanted_))):
        assert torch.equal(mine[1:].isnan(), theirs[1:].isnan())
        torch.testing.assert_close(
            mine[1:].float(), theirs[1:], rtol=2 * ROUNDED[dtype], atol=roundings * ROUNDED[dtype], equal_nan=True
        )


def sites() -> list[tuple[torch.dtype, str, int]]:
    """dtype, heads, block size. Each new one compiles kernels for seconds, so not every combination."""
    found = [(torch.bfloat16, heads, 16) for heads in sorted(HEADS)]
    return [*found, *((dtype, "SmolLM2", 16) for dtype in LIMITS if dtype != torch.bfloat16),
            (torch.bfloat16, "Qwen3-0.6B", 256), (torch.float16, "SmolLM2", 256)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "heads", "block_size"), sites(), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_attention(name: str, dtype: torch.dtype, heads: str, block_size: int) -> None:
    """Chunks, mixed steps, cached prefixes and decode rows, with and without a window and norms, over blocks of NaN."""
    ops = provider(name, dtype, HEADS[heads], block_size)
    for step in STEPS.values():
        for window, norm in ((None, True), (100, False), (1, True)):
            x = case(*step, HEADS[heads], block_size, dtype=dtype, device="cuda", norm=norm)
            check(x, ops.attend, window, roundings=ROUNDINGS.get(name, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["triton", "fa3", "vllm"])
def test_a_long_prompt(name: str, dtype: torch.dtype) -> None:
    """8,192 positions at once, and their last 2,048 as a chunk over a cached prefix."""
    shape = HeadShape(4, 1, 128)
    ops = provider(name, dtype, shape, 16)
    for lengths in (([8192], [8192]), ([2048, 1], [8192, 8000])):
        x = case(*lengths, shape, 16, dtype=dtype, device="cuda")
        check(x, ops.attend, None, roundings=ROUNDINGS.get(name, 1))


def test_a_pool_of_more_numbers_than_32_bits_count() -> None:
    """Blocks whose first number lies past 2^31 are read and written where they are."""
    shape = HeadShape(4, 2, 128)
    small = case([40, 1], [70, 33], shape, 16, dtype=torch.bfloat16, device="cuda")
    blocks = 2**31 // (16 * 2 * 128) + 64
    planes = [torch.full((blocks, 16, 2, 128), torch.nan, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    shift = blocks - len(small.layer.k)
    for plane, old in zip(planes, (small.layer.k, values_of(small.layer)), strict=True):
        plane[shift:] = old
    table = torch.where(small.x.table < 10**9, small.x.table + shift, small.x.table)
    x = evolve(small.x, table=table, slots=small.x.slots + shift * 16, memo=Memo())
    want, _ = small.attend(provider("triton", torch.bfloat16, shape, 16).attend)
    layer = evolve(small.layer, k=planes[0], v=planes[1])
    for name in ("triton", "fa3", "vllm"):
        try:
            op = provider(name, torch.bfloat16, shape, 16).attend
        except pytest.skip.Exception:
            continue
        got = op(
            small.qkv, layer, evolve(x, memo=Memo()), shape, small.table, small.q_norm, small.k_norm, EPS, SCALE, None
        )
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_padding_rows_change_no_other(name: str) -> None:
    """The rows of a step are what they are without three rows of padding over a sink of NaN."""
    shape, size = HEADS["Qwen3-0.6B"], 256 if name in ("flash-attn", "torch") else 64
    ops = provider(name, torch.bfloat16, shape, size)
    for lengths in (STEPS["mixed"], STEPS["decode"]):
        plain, padded = (case(*lengths, shape, size, dtype=torch.bfloat16, device="cuda", padding=n) for n in (0, 3))
        padded = evolve(padded, qkv=torch.cat((plain.qkv, padded.qkv[len(plain.qkv) :])), layer=plain.layer,
                        q_norm=plain.q_norm, k_norm=plain.k_norm)  # fmt: skip
        want, _ = plain.attend(ops.attend)
        got, _ = padded.attend(ops.attend)
        torch.testing.assert_close(got[: len(want)], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model(name: str, dtype: str, shape: str, tiny_folder: Callable[[str, str], Path]) -> None:
    """A tiny model computes in chunks, mixed steps and token by token the logits of the reference in float32, with at
    most 1.2 times the error that the reference itself has in this dtype.
    """
    kind, ranks = getattr(torch, dtype), alone(CUDA)
    model, weights = load_model(tiny_folder(shape, "float32"), kind, ranks)
    heads = HeadShape(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
    block_size = 256 if name in ("flash-attn", "torch") else 16
    truth = Driver(evolve(model, dtype=torch.float32), as_float(weights), ranks, block_size, reference())
    drivers = [
        Driver(model, weights, ranks, block_size, ops) for ops in (provider(name, kind, heads, block_size), reference())
    ]
    tokens = torch.randint(0, 1000, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    steps: list[dict[int, list[int]]] = [{1: tokens[:100], 2: tokens[:1]}, {1: tokens[100:103], 2: tokens[1:180]}]
    steps += [{1: [tokens[103 + i]], 2: [tokens[180 + i]]} for i in range(3)]
    steps += [{3: tokens[:33], 1: [tokens[106]], 2: tokens[183:200]}]
    off, whole = [0.0, 0.0], 0.0
    for work in steps:
        want = truth.step(work)
        whole += sum(float(x.norm() ** 2) for x in want.values())
        for i, driver in enumerate(drivers):
            got = driver.step(work)
            off[i] += sum(float((got[row] - want[row]).norm() ** 2) for row in work)
    mine, its = ((x / whole) ** 0.5 for x in off)
    assert mine < max(1.2 * its, 1e-5), f"error {mine}, of the reference {its}"


def test_flash_attention_3_in_a_captured_graph() -> None:
    """Captured with bounds for any length and replayed for other lengths, FlashAttention-3 gives what it gives eagerly
    for those bounds.
    """
    provider("fa3", torch.bfloat16, HEADS["Qwen3-8B"], 16)
    x = case([1] * 8, [5, 60, 700, 1, 33, 2000, 16, 17], HEADS["Qwen3-8B"], 16, dtype=torch.bfloat16, device="cuda")
    for plane in (x.layer.k, values_of(x.layer)):
        plane.nan_to_num_(0.5)
    q = torch.randn(8, 32, 128, device=CUDA, dtype=torch.bfloat16)
    table = x.x.table[x.x.rows].clamp(0, len(x.layer.k) - 1)
    context = torch.ones_like(x.x.context)

    def attend() -> Tensor:
        return attend_fa3(q, x.layer.k, values_of(x.layer), table, x.x.cu_seqlens_q, context, 1, 2016, SCALE, None)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lengths in (x.x.context, torch.full_like(context, 2), x.x.context.flip(0).clamp(max=5)):
        context.copy_(lengths)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, attend())


def test_the_schemas_that_our_calls_were_tested_against() -> None:
    """The operators of the vllm that is here have the arguments of those in tests/ops/test_vllm_ops.py."""
    if refusal("vllm", Site.of(CUDA, torch.bfloat16, HEADS["Qwen3-8B"], 16)):
        pytest.skip("no vllm")
    spaces = {"_vllm_fa3_C": [FWD], "_C": list(SMALL), "_C_cache_ops": [CACHE], "_flashmla_C": [DENSE_DECODE]}
    libraries = {"_vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C.abi3.so", "_flashmla_C": "_flashmla_C.abi3.so"}
    for space, schemas in spaces.items():
        for schema in schemas:
            name, _, arguments = schema.partition("(")
            assert missing(space, libraries.get(space, "_C_stable_libtorch.abi3.so"), name) is None
            real = getattr(getattr(torch.ops, space), name).default._schema
            names = [part.split()[-1].partition("=")[0] for part in arguments[: arguments.index(") ->")].split(",")]
            assert [argument.name for argument in real.arguments] == names


def test_auto_takes_what_is_here() -> None:
    """auto on a GPU is Triton, with FlashAttention-3 where vllm is; a provider whose rule is broken is refused."""
    _, why = choose.choose("auto", CUDA, torch.bfloat16, HEADS["Qwen3-8B"], 16)
    assert why["norm_qkv"].startswith("triton")
    with pytest.raises(InvalidSetting, match="head_dim 96"):
        choose.choose("triton", CUDA, torch.bfloat16, HeadShape(8, 8, 96), 16)
