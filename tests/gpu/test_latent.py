"""Latent attention by our kernels on this GPU: against float32 over the same rounded numbers, with and without
programmatic dependent launch, alone and in captured graphs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.ops import kv as kvs
from agentinfer.ops import latent
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import Site, chosen, refusal
from agentinfer.ops.inputs import Inputs, Memo, by_hand
from agentinfer.ops.kernels.attend_latent import LatentTile, attend_latent
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.provide import LayerShape, reference
from agentinfer.ops.rope import RopeSpec, cos_sin

CUDA = torch.device("cuda")
SHAPES = {
    "V2-Lite": LatentShape(16, 128, 64, 512, 128),
    "V3": LatentShape(128, 128, 64, 512, 128),
    "V3 of 8 ranks": LatentShape(16, 128, 64, 512, 128, interleaved=False),
    "V3 of 4 ranks": LatentShape(32, 128, 64, 512, 128),
    "small": LatentShape(5, 32, 16, 64, 16),
}
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 5e-5}
EPS, BLOCK = 1e-6, 16


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    gen = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(shape, generator=gen, device=CUDA) * scale).to(dtype)


class Case:
    """Rows over blocks of NaN whose earlier positions hold random latents, in some dtype; or the same in float32."""

    def __init__(
        self, shape: LatentShape, starts: list[int], counts: list[int], dtype: torch.dtype, block: int = BLOCK
    ) -> None:
        self.shape, self.dtype, self.starts, self.counts, self.block = shape, dtype, starts, counts, block
        total, cached = sum(counts), shape.cached_dim
        both = rand(total, shape.num_heads * shape.query_dim + cached, seed=3, dtype=dtype)
        self.q, self.new = both[:, :-cached], both[:, -cached:]
        wide = shape.nope_dim + shape.value_dim
        self.kv_b = rand(shape.num_heads, wide, shape.latent_dim, seed=9, dtype=dtype, scale=shape.latent_dim**-0.5)
        self.norm = (1 + rand(shape.latent_dim, seed=8, scale=0.2)).to(dtype)
        self.angles = cos_sin(RopeSpec(1e4, shape.rope_dim), 4096, CUDA)
        self.scale = shape.query_dim**-0.5

    def step(self, dtype: torch.dtype) -> tuple[Inputs, LayerKv]:
        """The inputs, and the layer's cache before the step."""
        longest = max(a + n for a, n in zip(self.starts, self.counts, strict=True))
        columns, rows, block = longest // self.block + 1, len(self.starts), self.block
        layout = kvs.mla(block, self.shape.latent_dim, self.shape.rope_dim, dtype)
        kv = kvs.allocate([layout], columns * rows, rows, columns, CUDA, math.nan)
        order = torch.randperm(columns * rows, generator=torch.Generator().manual_seed(1)).add(1).view(rows, columns)
        x, kv = by_hand(kv, [[1] * n for n in self.counts], self.starts, order.tolist(), list(range(rows, 0, -1)))
        for row, start in enumerate(self.starts):
            if start:
                at = torch.arange(start)
                slots = (order[row][at // block] * block + at % block).to(CUDA)
                old = rand(start, 1, self.shape.cached_dim, seed=100 + row, dtype=self.dtype)
                kv.layers[0].k.flatten(0, 1)[slots] = old.to(dtype)
        return x, kv.layers[0]

    def run(self, op: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output and cache by an Ops.attend_latent."""
        x, kv = self.step(dtype)
        q, new, norm, kv_b = (v.to(dtype) for v in (self.q, self.new, self.norm, self.kv_b))
        out = op(q, new, kv, x, self.shape, self.angles, norm, kv_b, self.scale, EPS)
        return out, kv.k

    def decode(self, tile: LatentTile | None, x: Inputs, kv: LayerKv, *, pdl: bool) -> Tensor:
        """By the kernels of single queries, with some tile."""
        return attend_latent(
            self.q, self.new, kv.k, x.table, x.rows, x.context, x.slots, self.shape.nope_dim, self.angles, self.norm,
            self.kv_b, EPS, self.scale, interleaved=self.shape.interleaved, pdl=pdl, tile=tile,
        )  # fmt: skip

    def check(self, got: tuple[Tensor, Tensor]) -> None:
        """It is float32's output and cache."""
        want = self.run(reference().attend_latent, torch.float32)
        limit = LIMITS[self.dtype]
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine.float(), theirs, rtol=limit, atol=limit, equal_nan=True)


def here(op: Any = latent.attend, *, pdl: bool = False) -> Any:
    """Ops.attend_latent of ours."""
    return lambda *args: op(*args, pdl=pdl)


# Float32 is for tests, of few rows.
@pytest.mark.parametrize(
    ("rows", "dtype"), [(n, d) for n in (1, 6, 24, 70) for d in LIMITS if n < 70 or d.itemsize < 4]
)
@pytest.mark.parametrize("name", SHAPES)
def test_decode_as_chosen(name: str, rows: int, dtype: torch.dtype) -> None:
    """With the tile chosen for that many rows, rows of 1 to 3,000 keys are float32's, PDL changes no bit."""
    starts = [(3000, 0, 16, 699, 15, 33)[i % 6] + i // 6 for i in range(rows)]
    case = Case(SHAPES[name], starts, [1] * rows, dtype)
    got, again = (case.run(here(pdl=pdl), dtype) for pdl in (False, True))
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(got, again, strict=True))
    case.check(got)


@pytest.mark.parametrize(
    "tile",
    [LatentTile(1, 32, 16, 4, 2), LatentTile(8, 64, 16, 4, 2, 64), LatentTile(64, 32, 16, 8, 3),
     LatentTile(4, 32, 64, 8, 2)],
)  # fmt: skip
def test_decode_tiles(tile: LatentTile) -> None:
    """Any split, number of keys and heads at once gives float32's output; a graph of it, replayed, the same bits."""
    shape = SHAPES["V3 of 4 ranks" if tile.heads > 16 else "V2-Lite"]
    case = Case(shape, [2999, 0, 16, 699], [1] * 4, torch.bfloat16)
    x, kv = case.step(torch.bfloat16)
    got = case.decode(tile, x, kv, pdl=True)
    case.check((got, kv.k))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = case.decode(tile, x, kv, pdl=True)
    worst = torch.zeros((), device=CUDA)
    for _ in range(50):
        out.fill_(math.nan)
        graph.replay()
        worst = torch.maximum(worst, (out != got).sum())
    assert worst.item() == 0


@pytest.mark.parametrize("rows", [2, 20])
def test_padding_changes_nobody(rows: int) -> None:
    """Rows of padding write to the sink and give finite numbers; other rows stay bit for bit."""
    case = Case(SHAPES["V2-Lite"], [700 - i for i in range(rows)], [1] * rows, torch.bfloat16)
    tile = LatentTile(4, 32, 16, 4, 2, 64)
    x, kv = case.step(torch.bfloat16)
    want = case.decode(tile, x, kv, pdl=True)
    real = rows - 1
    zero = torch.arange(rows, device=CUDA) < real
    padded = evolve(
        x, rows=x.rows * zero, slots=x.slots * zero, context=torch.where(zero, x.context, torch.ones_like(x.context))
    )
    x, kv = case.step(torch.bfloat16)
    got = case.decode(tile, padded, kv, pdl=True)
    assert torch.equal(got[:real], want[:real])
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", ["V2-Lite", "V3 of 8 ranks", "small"])
def test_chunks(name: str, dtype: torch.dtype) -> None:
    """Prompts, chunks behind cached keys and single queries in one step are float32's, output and cache."""
    case = Case(SHAPES[name], [0, 700, 0, 33, 1000], [300, 1, 1, 70, 129], dtype)
    case.check(case.run(here(), dtype))


def by_vllm(name: str, shape: LatentShape, dtype: torch.dtype) -> tuple[Any, int]:
    """(Ops.attend_latent of vLLM's kernel *name*, its block size); skips where it is not here."""
    block = 64 if name == "flashmla" else BLOCK
    site = Site.of(CUDA, dtype, LayerShape(HeadShape(shape.num_heads, 1, shape.cached_dim), shape, None), block)
    problem = refusal(name, site)
    return pytest.skip(problem) if problem else (chosen(name, site)[0].attend_latent, block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("shape", ["V2-Lite", "V3", "V3 of 8 ranks", "V3 of 4 ranks"])
@pytest.mark.parametrize("name", ["fa3-mla", "flashmla"])
def test_decode_by_vllm(name: str, shape: str, rows: int, dtype: torch.dtype) -> None:
    """vLLM's kernels over our cache as it is, rows of 1 to 3,000 keys over blocks of NaN, give float32's output."""
    op, block = by_vllm(name, SHAPES[shape], dtype)
    starts = [(3000, 0, 16, 699, 15, 33)[i % 6] + i // 6 for i in range(rows)]
    case = Case(SHAPES[shape], starts, [1] * rows, dtype, block)
    case.check(case.run(op, dtype))


@pytest.mark.parametrize("name", ["fa3-mla", "flashmla"])
def test_a_graph_of_vllms_kernels_follows_the_lengths(name: str) -> None:
    """Captured with a bound for any length, and replayed for other lengths, they give what they give eagerly."""
    op, block = by_vllm(name, SHAPES["V2-Lite"], torch.bfloat16)
    case = Case(SHAPES["V2-Lite"], [2999, 60, 16, 699], [1] * 4, torch.bfloat16, block)
    x, kv = case.step(torch.bfloat16)
    kv.k.nan_to_num_(0.5)
    rest = (case.shape, case.angles, case.norm, case.kv_b, case.scale, EPS)

    def attend() -> Tensor:
        step = evolve(x, host=None, max_context=3072, memo=Memo())
        return op(case.q, case.new, kv, step, *rest)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for shorter in (0, 1, 1500):
        x.context.sub_(shorter).clamp_(min=1)
        want = attend()
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
