"""Latent attention by vLLM's kernels, whose operators the reference computes behind the very schemas of vllm 0.26."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import attention, latent, vllm_latent
from agentinfer.ops import kv as kvs
from agentinfer.ops.inputs import Inputs, Memo, by_hand
from agentinfer.ops.kv import KvCache, LayerKv
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.provide import AttendLatent, reference
from agentinfer.ops.rope import RopeSpec, cos_sin
from ops.test_vllm_ops import DENSE_DECODE, FWD, fwd

SHAPE = LatentShape(num_heads=3, nope_dim=16, rope_dim=64, latent_dim=512, value_dim=16)
BLOCKS = {"fa3-mla": 16, "flashmla": 64}
EPS, SCALE = 1e-6, 0.2
ANGLES = cos_sin(RopeSpec(1e4, 64), 300)

Seen = list[tuple[Tensor | None, Tensor | None]]


def names_of(schema: str) -> list[str]:
    """The parameters of an operator, in order."""
    return [part.split()[-1] for part in schema[schema.index("(") + 1 : schema.index(") ->")].split(",")]


def dense_decode(schema: str, seen: Seen) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The operator, by the reference; *seen*: the schedules that it was given."""

    def call(*args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a = dict(zip(names_of(schema), args, strict=True))
        q, cache, context, table = a["q"], a["kcache"], a["seqlens_k"], a["block_table"]
        assert q.shape[1:] == (1, SHAPE.num_heads, 576)
        assert cache.shape[1:] == (64, 1, 576)
        assert (a["head_size_v"], a["is_causal"], a["out_"]) == (512, False, None)
        assert context.dtype == table.dtype == torch.int32
        given = a["tile_scheduler_metadata"], a["num_splits"]
        seen.append(given)
        lengths = attention.RowLengths([1] * len(q), context.tolist(), [False] * len(q))
        index = attention.attention_index(table, lengths, 64, None, q.dtype)
        out = attention.attend_index(q.squeeze(1), cache, cache[..., :512], index, a["softmax_scale"])
        parts, splits = (torch.zeros(2, 8) if x is None else x for x in given)
        return out.unsqueeze(1), torch.zeros(1), parts, splits

    return call


@pytest.fixture
def seen() -> Iterator[Seen]:
    """vLLM's namespaces for a test; the schedules that FlashMLA is called with."""
    calls: Seen = []
    fa3, mla = (torch.library.Library(name, "FRAGMENT") for name in ("_vllm_fa3_C", "_flashmla_C"))
    fa3.define(" ".join(FWD.split()))
    fa3.impl("fwd", fwd, "CPU")
    mla.define(DENSE_DECODE)
    mla.impl("dense_decode_fwd", dense_decode(DENSE_DECODE, calls), "CPU")
    yield calls
    for space in (fa3, mla):
        space._destroy()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(starts: list[int], counts: list[int], block: int) -> tuple[Inputs, KvCache]:
    """Rows over a pool of NaN whose earlier positions hold the same random latents for every caller; two layers."""
    columns, rows = max(a + n for a, n in zip(starts, counts, strict=True)) // block + 1, len(starts)
    layout = kvs.mla(block, 512, 64, torch.float32)
    kv = kvs.allocate([layout] * 2, columns * rows, rows, columns, torch.device("cpu"), math.nan)
    blocks = [[1 + row + rows * i for i in range(columns)] for row in range(rows)]
    x, kv = by_hand(kv, [[1] * n for n in counts], starts, blocks, list(range(rows, 0, -1)))
    for row, start in enumerate(starts):
        for at in range(start):
            for layer in kv.layers:
                layer.k[blocks[row][at // block], at % block, 0] = rand(576, seed=100 * row + at)
    return x, kv


def run(op: AttendLatent, kv: LayerKv, x: Inputs, shape: LatentShape = SHAPE) -> Tensor:
    both = rand(len(x.ids), shape.num_heads * shape.query_dim + 576, seed=3)
    kv_b = 0.1 * rand(shape.num_heads, shape.nope_dim + shape.value_dim, 512, seed=9)
    return op(both[:, :-576], both[:, -576:], kv, x, shape, ANGLES, 1 + 0.2 * rand(512, seed=8), kv_b, SCALE, EPS)


def same(name: str, starts: list[int], counts: list[int], shape: LatentShape = SHAPE) -> None:
    """Output and cache are the reference's."""
    results = []
    below = evolve(reference(), attend_latent=latent.attend)
    for op in (vllm_latent.with_latent(below, name).attend_latent, reference().attend_latent):
        x, kv = step(starts, counts, BLOCKS[name])
        results.append((run(op, kv.layers[0], x, shape), kv.layers[0].k))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.usefixtures("seen")
def test_single_queries_are_the_reference(name: str, interleaved: bool) -> None:
    """Rows of any length, from none to many keys before, give the reference's output and cache, by one call whose
    arguments are named as its schema names them.
    """
    same(name, [0, 70, 5, 16], [1] * 4, evolve(SHAPE, interleaved=interleaved))


@pytest.mark.parametrize("name", BLOCKS)
def test_several_queries_a_row_stay_with_the_other_ops(seen: Seen, name: str) -> None:
    """A step with a chunk in it is not vLLM's."""
    same(name, [6, 30], [1, 14])
    assert not seen


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.usefixtures("seen")
def test_padding_changes_nobody(name: str) -> None:
    """A row of padding writes to the sink, and the other rows are what they are without it."""
    op, results = vllm_latent.with_latent(reference(), name).attend_latent, []
    for padded in (False, True):
        x, kv = step([9, 20], [1, 1], BLOCKS[name])
        if padded:
            kv.layers[0].k[0] = 0.5
            pad = {"rows": 0, "slots": 0, "context": 1, "positions": 0}
            extended = {k: torch.cat((getattr(x, k), getattr(x, k).new_tensor([v]))) for k, v in pad.items()}
            ends = torch.arange(4, dtype=torch.int32)
            x = evolve(x, **extended, ids=x.ids.repeat(2)[:3], cu_seqlens_q=ends, memo=Memo())
        results.append(run(op, kv.layers[0], x)[:2])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_step_is_scheduled_once(seen: Seen) -> None:
    """FlashMLA makes its schedule in the first layer; the second one gets it, and the next step makes its own."""
    op = vllm_latent.with_latent(reference(), "flashmla").attend_latent
    for _ in range(2):
        x, kv = step([9, 20], [1, 1], 64)
        for layer in kv.layers:
            run(op, layer, x)
    assert [given[0] is None for given in seen] == [True, False, True, False]
    assert seen[1][1] is not None


def test_arguments_go_by_their_names() -> None:
    """A kernel whose parameters stand in another order gets the same arguments, one with other names is refused."""
    x, kv = step([9], [1], 64)
    q = rand(1, SHAPE.num_heads, 576)
    names = DENSE_DECODE[DENSE_DECODE.index("(") + 1 : DENSE_DECODE.index(") ->")]
    other = DENSE_DECODE.replace(names, ", ".join(reversed(names.split(","))))
    for schema in (DENSE_DECODE, other, DENSE_DECODE.replace("kcache", "k_cache")):
        space = torch.library.Library("_flashmla_C", "FRAGMENT")
        try:
            space.define(schema)
            space.impl("dense_decode_fwd", dense_decode(schema, []), "CPU")
            kv.layers[0].k.nan_to_num_(0.5)
            if "k_cache" in schema:
                with pytest.raises((RuntimeError, TypeError), match="missing value for argument 'k_cache'"):
                    vllm_latent.attend_flashmla(q, kv.layers[0], evolve(x, memo=Memo()), SCALE)
            else:
                out = vllm_latent.attend_flashmla(q, kv.layers[0], evolve(x, memo=Memo()), SCALE)
                assert out.shape == (1, SHAPE.num_heads, 512)
        finally:
            space._destroy()


def test_what_is_not_there_is_named() -> None:
    """Without vllm the provider says so by its own name; a cache of keys and values is refused."""
    with pytest.raises(InvalidSetting, match="ops: flashmla: vllm is not installed"):
        vllm_latent.with_latent(reference(), "flashmla")


@pytest.mark.usefixtures("seen")
def test_a_cache_of_keys_and_values_is_refused() -> None:
    """Latents are read from a cache of latents only."""
    x, _ = step([3], [1], 64)
    other = kvs.allocate([kvs.gqa(64, 1, 576, torch.float32)], 2, 1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="caches keys and values"):
        run(vllm_latent.with_latent(reference(), "flashmla").attend_latent, other.layers[0], x)
