"""Our decode kernels on this GPU: each against float32 over the same rounded numbers, with and without programmatic
dependent launch, alone and in captured graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve
from torch import Tensor

from agentinfer.models.model import load_model
from agentinfer.ops import norm, provide, sample
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs, Memo, by_hand
from agentinfer.ops.kernels import filter as filters
from agentinfer.ops.kernels import noise
from agentinfer.ops.kernels import sample as kernel
from agentinfer.ops.kernels.add_norm import add_norm, fused_add_rms_norm, rms_norm
from agentinfer.ops.kernels.attend_decode import COUNTERS, attend_decode
from agentinfer.ops.kernels.embed import embed
from agentinfer.ops.kernels.filter import CHUNK, choose_filtered
from agentinfer.ops.kernels.gemm import gemm
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.sample import sample_tokens
from agentinfer.ops.kernels.silu import silu_and_mul
from agentinfer.ops.kernels.tiles import AttendTile, GemmTile, GemvTile
from agentinfer.ops.triton_ops import triton_ops
from agentinfer.state.columns import PARAMS
from gpu_shapes import SHAPES
from models.drive import Driver
from ops.ragged import EPS, SCALE, case

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of a product: relative to the norm of its row."""
ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
WIDTHS = {  # hidden, query heads, KV heads, head dim, feed forward, vocabulary
    "Qwen3-8B": (4096, 32, 8, 128, 12288, 151936),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 151936),
    "SmolLM2": (576, 9, 3, 64, 1536, 49152),
    "Qwen2-0.5B": (896, 14, 2, 64, 4864, 151936),
    "small": (192, 4, 2, 64, 320, 1001),
}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    gen = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(shape, generator=gen, device=CUDA) * scale).to(dtype)


def off(got: Tensor, want: Tensor) -> float:
    """The largest error of a row, relative to its norm."""
    got, want = got.float(), want.float()
    assert got.shape == want.shape
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def products(name: str) -> dict[str, tuple[int, int, bool]]:
    """N, K, gated of the products of a layer and of the head."""
    d, n, h, dim, f, v = WIDTHS[name]
    return {
        "qkv": ((n + 2 * h) * dim, d, False), "o": (d, n * dim, False), "gate_up": (f, d, True), "down": (d, f, False),
        "head": (v, d, False),
    }  # fmt: skip


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return norm.silu_and_mul(y) if gated else y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WIDTHS)
def test_gemv(name: str, dtype: torch.dtype) -> None:
    """One row times every weight of these models, with its norm, gate or residual, is float32's, PDL or not."""
    for part, (n, k, gated) in products(name).items():
        weight = rand(2 * n if gated else n, k, seed=1, dtype=dtype, scale=k**-0.5)
        bias = rand(len(weight), seed=2, dtype=dtype) if part in {"qkv", "gate_up"} else None
        scale = None if part in {"o", "down"} else 1 + rand(k, seed=3, dtype=dtype, scale=0.2)
        x = rand(1, k, seed=4, dtype=dtype if scale is None else torch.float32)
        residual = rand(1, n, seed=5) if scale is None else None
        want = wanted(x if scale is None else norm.rms_norm(x, scale.float(), EPS), weight, bias, gated=gated)
        want = want if residual is None else want + residual
        results = [
            gemv(
                x, weight, torch.float32 if part == "head" else dtype, norm_K=scale, eps=EPS, bias=bias, gated=gated,
                add_to=None if residual is None else residual.clone(), pdl=pdl,
            )
            for pdl in (False, True)
        ]  # fmt: skip
        assert off(results[0], want) < ERROR[dtype], part
        assert torch.equal(*results), part


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", WIDTHS)
def test_gemm(name: str, dtype: torch.dtype) -> None:
    """2 to 128 rows times every weight of these models, whole or in parts, are float32's, PDL or not."""
    for part, (n, k, gated) in products(name).items():
        weight = rand(2 * n if gated else n, k, seed=1, dtype=dtype, scale=k**-0.5)
        bias = rand(len(weight), seed=2, dtype=dtype) if part != "head" else None
        partial = part in {"o", "down"}
        out = torch.float32 if partial or part == "head" else dtype
        for rows in (2, 17, 64, 100, 128):
            x = rand(rows, k, seed=rows, dtype=dtype)
            results = [gemm(x, weight, out, bias=bias, gated=gated, partial=partial, pdl=pdl) for pdl in (False, True)]
            assert torch.equal(*results), part
            got = results[0].sum(0) if partial else results[0]
            assert off(got, wanted(x, weight, bias, gated=gated)) < ERROR[dtype], (part, rows)


@pytest.mark.parametrize("m", [16, 32, 64])
@pytest.mark.parametrize("n", [32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_small_gemm_tiles(m: int, n: int, gated: bool) -> None:
    """Tiles of any height and width give the product, also where rows need two of them."""
    x, weight = rand(40, 576, dtype=torch.bfloat16), rand(640, 576, seed=1, dtype=torch.bfloat16, scale=1 / 24)
    for split in (1, 3):
        got = gemm(x, weight, torch.float32, gated=gated, partial=not gated, tile=GemmTile(m, n, 64, 3, 4, split))
        assert off(got if gated else got.sum(0), wanted(x, weight, None, gated=gated)) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [pytest.param(576, id="small"), 1024, 4096])
@pytest.mark.parametrize("pdl", [False, True])
def test_add_norm_silu_embed(dtype: torch.dtype, width: int, pdl: bool) -> None:
    """Norms, gated activation and embedding are float32's within one unit in the last place."""
    residual, parts, weight = rand(5, width), rand(3, 5, width, seed=1), 1 + rand(width, seed=2, dtype=dtype, scale=0.2)
    total = residual + parts[0] + parts[1] + parts[2]
    close = {"rtol": ULP[dtype], "atol": 1e-6}
    want = norm.rms_norm(total, weight.float(), EPS)
    rows = torch.tensor([4, 0], device=CUDA)
    some = add_norm(residual, parts, weight, EPS, dtype, rows=rows, pdl=pdl)
    torch.testing.assert_close(some.float(), want[rows], **close)
    torch.testing.assert_close(add_norm(residual, parts, weight, EPS, dtype, pdl=pdl).float(), want, **close)
    torch.testing.assert_close(residual, total)
    x, other = rand(5, 3, width, seed=4, dtype=dtype), rand(5, 3, width, seed=5, dtype=dtype)
    want = norm.rms_norm(x.float(), weight.float(), EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).float(), want, **close)
    normed, added = fused_add_rms_norm(x, other, weight, EPS)
    assert torch.equal(added, x + other)
    torch.testing.assert_close(normed.float(), norm.rms_norm(added.float(), weight.float(), EPS), **close)
    want = norm.silu_and_mul(torch.cat((x, other), -1).float())
    torch.testing.assert_close(silu_and_mul(torch.cat((x, other), -1), pdl=pdl).float(), want, **close)
    assert torch.equal(embed(rows, x[:, 0].contiguous(), pdl=pdl), x[rows, 0].float())


HEADS = {
    "Qwen3-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "SmolLM2": (9, 3, 64),
    "Qwen2-0.5B": (14, 2, 64),
    "small": (4, 2, 64),
}
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize(
    "tile",
    [
        None, AttendTile(1, 32, 2, 2), AttendTile(8, 32, 2, 2), AttendTile(32, 64, 4, 3),
        AttendTile(1, 32, 2, 3, ahead=True), AttendTile(1, 64, 2, 3, early=False, ahead=True),
        AttendTile(4, 64, 2, 2, 128, registers=168, whole=3), AttendTile(8, 32, 2, 3, ahead=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", HEADS)
def test_attend_decode(name: str, tile: AttendTile | None) -> None:
    """Rows of 1 to 3,000 keys over blocks of NaN are float32's for any split, PDL changes no bit, counters stay 0."""
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=CUDA)
    lengths = [1, 17, 16, 700, 3000, 33]
    for window, normed in ((None, True), (100, False)):
        x = case([1] * 6, lengths, HeadShape(*HEADS[name]), 16, dtype=torch.bfloat16, device="cuda", norm=normed)

        def op(pdl: bool) -> provide.Attend:
            def attend(qkv: Tensor, kv: Any, i: Inputs, shape: HeadShape, *rest: Any) -> Tensor:
                return attend_decode(
                    qkv, kv.k, values_of(kv), i.table, i.rows, i.context, i.slots, shape.num_heads, *rest, counters,
                    pdl=pdl, tile=tile,
                )  # fmt: skip

            return attend

        got, cache = x.attend(op(pdl=False), window)
        again, cache_again = x.attend(op(pdl=True), window)
        assert torch.equal(got, again)
        assert torch.equal(cache.k.nan_to_num(9.0), cache_again.k.nan_to_num(9.0))
        assert not counters.any()
        wide = evolve(x, qkv=x.qkv.float(), layer=evolve(x.layer, k=x.layer.k.float(), v=values_of(x.layer).float()),
                      q_norm=None if x.q_norm is None else x.q_norm.float(),
                      k_norm=None if x.k_norm is None else x.k_norm.float())  # fmt: skip
        want, _ = wide.attend(provide.attend_reference, window)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 24, 40])
def test_attend_decode_as_chosen(dtype: torch.dtype, rows: int) -> None:
    """With the tile chosen for that many rows, every dtype is float32's, and padding changes no bit of others."""
    shape = HeadShape(8, 8, 64) if rows == 1 else HeadShape(16, 8, 128)
    lengths = [1 + 67 * i % 900 for i in range(rows)]
    x = case([1] * rows, lengths, shape, 16, dtype=dtype, device="cuda")
    got, _ = x.attend(triton_ops(CUDA).attend)
    wide = evolve(x, qkv=x.qkv.float(), layer=evolve(x.layer, k=x.layer.k.float(), v=values_of(x.layer).float()),
                  q_norm=x.q_norm.float(), k_norm=x.k_norm.float())  # fmt: skip
    want, _ = wide.attend(provide.attend_reference)
    torch.testing.assert_close(got.float(), want, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    tile = AttendTile(2, 32, 2, 2)
    results = []
    for padding in (0, 3):
        zero = torch.zeros(padding, dtype=torch.int64, device=CUDA)
        results.append(
            attend_decode(
                torch.cat((x.qkv, rand(padding, x.qkv.shape[1], dtype=dtype))), x.layer.k.clone(),
                values_of(x.layer).clone(), x.x.table, torch.cat((x.x.rows, zero)),
                torch.cat((x.x.context, zero.int() + 1)), torch.cat((x.x.slots, zero)), shape.num_heads, x.table,
                x.q_norm, x.k_norm, EPS, SCALE, None, torch.zeros(1024, dtype=torch.int32, device=CUDA), tile=tile,
            )
        )  # fmt: skip
    assert torch.equal(results[0], results[1][:rows])
    assert results[1].isfinite().all()


@triton.jit
def _noise(out, seed, index, DEVICE: tl.constexpr):
    block, lane = tl.arange(0, 256), tl.arange(0, 4)
    tl.store(
        out + block[:, None] * 4 + lane[None, :],
        noise._gumbel(tl.load(seed), tl.load(seed + 1), tl.load(index), block, lane, DEVICE),
    )


@pytest.mark.parametrize("seed", [0, 12345, 2**62 + 7, -1])
def test_sample_noise(seed: int) -> None:
    """The noise of this GPU is that of the reference within 2e-6."""
    out = torch.empty(1024, device=CUDA)
    index = torch.tensor([77], dtype=torch.int32, device=CUDA)
    _noise[(1,)](out, torch.tensor([seed], device=CUDA).view(torch.int32), index, DEVICE=True)
    np.testing.assert_allclose(out.cpu().numpy(), sample.gumbel(seed, 77, np.arange(1024)), rtol=2e-6, atol=2e-6)


@triton.jit
def _noise_of(out, BLOCK: tl.constexpr, DEVICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, noise._gumbel_of(at, DEVICE))


def test_all_noise_there_is() -> None:
    """For each of the 2^23 values of u this GPU's noise is within 2e-6 of float64's, or 2e-6 of itself."""
    out = torch.empty(2**23, device=CUDA)
    _noise_of[(2**13,)](out, 1024, DEVICE=True)
    want = -np.log(-np.log((np.arange(2**23) + 0.5) * 2.0**-23))
    assert (np.abs(out.cpu().numpy() - want) / (2e-6 + 2e-6 * np.abs(want))).max() < 0.25


@triton.jit
def _quotient(x, temperature, out, BLOCK: tl.constexpr, DEVICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, filters._w(tl.load(x + at), 0.0, tl.load(temperature), DEVICE))


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 0.7, 1.0, 1.3, 1.9999999, 2.0, 100.0])
def test_quotients_of_filters_are_rounded(temperature: float) -> None:
    """The division of the filters is float32's own, of 0, of large and small numbers and of infinity too."""
    x = rand(2**20) * 10.0 ** (8 * rand(2**20, seed=1)).clamp(-20, 28)
    x[:4] = torch.tensor([0.0, -0.0, math.inf, 1e-25])
    t, out = torch.tensor([temperature], device=CUDA), torch.empty_like(x)
    _quotient[(2**10,)](x, t, out, 1024, DEVICE=True)
    assert torch.equal(out.cpu().view(torch.int32), (x.abs().cpu() / t.cpu()).view(torch.int32))


def candidates(logits: Any, how: dict[str, Any], pdl: bool) -> tuple[list[int], list[int], list[int]]:
    """Tokens of a row around where the reference cuts, what the filters make of each as a candidate, and the kept."""
    kept, _ = sample.survivors(logits, **{"temperature": 0.7, **how})
    order = np.argsort(-logits, kind="stable")
    near = {0, *(len(kept) + x for x in (-20000, -1000, -40, -3, -2, -1, 0, 1, 2, 40, 1000, 20000)), len(order) - 1}
    tried = order[[x for x in sorted(near) if 0 <= x < len(order) and logits[order[x]] > -math.inf]]
    params = np.zeros(len(tried), PARAMS)
    params["temperature"], params["top_p"], params["seed"] = 0.7, 1, 5
    for key, value in how.items():
        params[key] = value
    words = torch.from_numpy(params.view(np.int32).reshape(len(tried), -1)).to(CUDA)
    index = torch.arange(len(tried), dtype=torch.int32, device=CUDA)
    rows = torch.from_numpy(logits).to(CUDA).expand(len(tried), -1)
    tiles = -(-len(logits) // kernel.TILE)
    maxima = torch.full((len(tried), tiles * (kernel.TILE // CHUNK)), math.nan, device=CUDA)
    numbers = kernel._tiles(rows, words, index, 0, len(logits), tiles, 1e-5, maxima, pdl=pdl)
    tokens = torch.from_numpy(tried).to(CUDA)
    choose_filtered(rows, words, index, numbers, maxima, tokens, pdl=pdl)
    return tried.tolist(), tokens.tolist(), kept.tolist()


FILTERS: list[dict[str, Any]] = [
    {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.8, "min_p": 1e-4}, {"top_k": 1},
    {"top_p": 1e-4}, {"top_p": 0.999999}, {"top_k": 50, "top_p": 0.9}, {"top_k": 20000}, {"top_k": 10**6, "top_p": 0.5},
    {"temperature": 1e-5, "top_k": 50, "top_p": 0.9}, {"temperature": 100.0, "top_p": 0.7, "min_p": 0.5},
]  # fmt: skip


MASS = 1e-6
"""Sums are of float32 in part: where the mass before a token is this near to the cut, either verdict is right."""


def undecided(logits: np.ndarray[Any, Any], how: dict[str, Any]) -> set[int]:
    """The tokens whose verdict float32 can not tell: top-p cuts within MASS of the mass before them."""
    if "top_p" not in how:
        return set()
    order = np.argsort(-logits, kind="stable")[: how.get("top_k")]
    mass = np.exp((logits[order].astype(np.float64) - float(logits.max())) / how.get("temperature", 0.7))
    before = (np.cumsum(mass) - mass) / mass.sum()
    return set(order[np.abs(before - how["top_p"] * (1 - sample.TIE)) <= MASS].tolist())


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "flat", "equal", "one", "few"])
@pytest.mark.parametrize("vocabulary", [151936, pytest.param(1001, id="small")])
def test_filters(vocabulary: int, kind: str) -> None:
    """A candidate is kept where the host keeps it, but where the mass before it is within 1e-6 of where top-p cuts;
    what is refused makes room for one that is kept; so too in rows with many ties, of equal logits, of one and of few
    that are finite.
    """
    logits = rand(1, vocabulary, scale=3.0)[0]
    if kind in ("bfloat16", "flat"):
        logits = (logits if kind == "bfloat16" else 0.2 * logits).to(torch.bfloat16).float()
    if kind in ("equal", "one", "few"):
        logits = torch.full_like(logits, -math.inf if kind != "equal" else 2.5)
        logits[torch.arange(7, vocabulary, vocabulary if kind == "one" else 331, device=CUDA)] = 2.5
    for how in FILTERS:
        either = undecided(logits.cpu().numpy(), how)
        for pdl in (False, True):
            tried, now, kept = candidates(logits.cpu().numpy(), how, pdl)
            able = set(kept)
            wrong = {x for x, y in zip(tried, now, strict=True) if (x == y) != (x in able)} | (set(now) - able)
            assert not wrong - either, (how, wrong)


@pytest.mark.parametrize("vocabulary", [151936, 49152, pytest.param(1001, id="small")])
def test_sample_tokens(vocabulary: int) -> None:
    """Greedy and noisy rows choose the reference's tokens, ties the lowest id, unsound rows are not ok, PDL or not."""
    count = 24
    logits = rand(count, vocabulary + 3, scale=4.0)[:, :vocabulary]
    logits[0, 7] = logits[0, vocabulary - 1] = 99.0
    logits[1, 5], logits[2, 6], logits[3] = math.nan, math.inf, -math.inf
    params = np.zeros(count, PARAMS)
    params["top_p"] = 1
    params["temperature"] = [0.0, 1.0, 0.0, 0.5, *(0.3 * (i % 6) for i in range(count - 4))]
    params["seed"] = 2**33 * np.arange(count) - 5
    index = np.arange(count, dtype=np.int32) * 3
    words = torch.from_numpy(params.view(np.int32).reshape(count, -1)).to(CUDA)
    want = [
        int(row.argmax()) if p["temperature"] < sample.GREEDY_BELOW
        else sample.choose(*sample.survivors(row, float(p["temperature"])), int(p["seed"]), int(i))
        for row, p, i in zip(logits[4:].cpu().numpy(), params[4:], index[4:], strict=True)
    ]  # fmt: skip
    for pdl in (False, True):
        chosen = torch.full((2, count), -1, device=CUDA)
        sample_tokens(logits, words, torch.from_numpy(index).to(CUDA), chosen[0], chosen[1], pdl=pdl)
        tokens, ok = chosen.tolist()
        assert tokens[0] == 7
        assert tokens[4:] == want
        assert ok == [1, 0, 0, 0, *[1] * (count - 4)]
        assert all(0 <= token < vocabulary for token in tokens)


def prefilled(folder: Path, ops: provide.Ops, rows: int) -> tuple[Driver, Inputs]:
    """A model that has computed 40 or so positions of each row, and the inputs of its next decode step."""
    ranks = alone(CUDA)
    driver = Driver(*load_model(folder, torch.bfloat16, ranks), ranks, 16, ops)
    driver.step({row: [(7 * row + i) % 1000 for i in range(30 + 7 * row)] for row in range(1, rows + 1)})
    names = list(range(1, rows + 1))
    x, driver.kv = by_hand(
        driver.kv, [[row] for row in names], [driver.computed[row] for row in names],
        [driver.blocks[row] for row in names], names,
    )  # fmt: skip
    return driver, evolve(x, host=None, max_context=256)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_captured_step_is_the_eager_one(shape: str, rows: int, tiny_folder: Callable[[str, str], Path]) -> None:
    """Launched programmatically in a graph, 200 replays give bit for bit what plain launches give, without the host."""
    folder = tiny_folder(shape, "float32")
    results = []
    for pdl in (False, True):
        driver, x = prefilled(folder, triton_ops(CUDA, pdl=pdl), rows)
        for layer in driver.kv.layers:  # what the sink and unwritten slots hold is read by nobody
            assert layer.k[0].isnan().all()
        run = decode(driver, x)
        results.append(run())
        if pdl:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                logits = run()
            worst = torch.zeros((), device=CUDA)
            for _ in range(200):
                logits.fill_(math.nan)
                graph.replay()
                worst = torch.maximum(worst, (logits != results[0]).sum())
            assert worst.item() == 0
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def decode(driver: Driver, x: Inputs) -> Callable[[], Tensor]:
    """The step as a function of nothing, for a graph to capture."""

    def run() -> Tensor:
        logits, driver.kv = driver.model.forward(
            driver.model.config, driver.weights, driver.ops, driver.ranks, driver.kv, evolve(x, memo=Memo())
        )
        return logits

    return run


def test_small_gemv_tiles() -> None:
    """Tiles that divide neither rows nor columns give the product."""
    x, weight = rand(1, 1000, dtype=torch.bfloat16), rand(333, 1000, seed=1, dtype=torch.bfloat16, scale=1 / 30)
    for tile in (GemvTile(1, 64, 1), GemvTile(2, 1024, 2), GemvTile(8, 256, 4)):
        assert off(gemv(x, weight, torch.float32, tile=tile), wanted(x, weight, None, gated=False)) < 1e-2
