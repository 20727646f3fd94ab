"""Paged attention against a dense loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentinfer.ops import attention
from agentinfer.ops import kv as kvs
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import KvCache

CPU = torch.device("cpu")
N, H, D = 6, 2, 8
MIXED = ([1, 4, 5, 9, 300], [1, 4, 5, 3, 1])


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None) -> Tensor:
    """Attention of one row by the definition: query i sits at position start + i. [count, N, D] float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        at = start + i
        low = 0 if window is None else max(0, at - window + 1)
        for n in range(q.shape[1]):
            h = n // (q.shape[1] // k.shape[1])
            p = torch.softmax(k[low : at + 1, h].double() @ q[i, n].double() * scale, 0)
            out[i, n] = p @ v[low : at + 1, h].double()
    return out


class Batch:
    """Rows with shuffled physical blocks with gaps between, in a pool that is NaN wherever no key was written."""

    def __init__(
        self, context: list[int], count: list[int], block_size: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.context, self.count = context, count
        need = [-(-c // block_size) for c in context]
        kv = kvs.allocate(
            [kvs.gqa(block_size, H, D, dtype)], 2 * sum(need) + 3, len(context), max(need) + 1, CPU, math.nan
        )
        ids = (torch.randperm(2 * sum(need) + 3, generator=gen) + 1).tolist()
        self.blocks = [[ids.pop() for _ in range(n)] for n in need]
        self.q, self.k, self.v = (
            [torch.randn(c, heads, D, generator=gen).to(dtype) for c in lengths]
            for lengths, heads in ((count, N), (context, H), (context, H))
        )
        rows = [[1] * c for c in count]
        self.x, self.kv = by_hand(kv, rows, [a - b for a, b in zip(context, count, strict=True)], self.blocks)
        for k, v, blocks in zip(self.k, self.v, self.blocks, strict=True):
            slots = torch.tensor([blocks[at // block_size] * block_size + at % block_size for at in range(len(k))])
            attention.write_kv(k, v, self.kv.layers[0], slots)

    def want(self, window: int | None = None) -> Tensor:
        rows = zip(self.q, self.k, self.v, self.context, strict=True)
        return torch.cat([dense(q, k, v, c - len(q), 0.3, window) for q, k, v, c in rows])

    def run(self, window: int | None = None) -> Tensor:
        return attention.paged_attention(torch.cat(self.q), self.kv.layers[0], self.x, 0.3, window)


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_a_ragged_mix_equals_dense_attention(block_size: int, window: int | None) -> None:
    """KV-12: fresh prompts, a chunk over cached keys, decode rows and a row of 300 keys, at every block size and
    window, within 1e-5.
    """
    batch = Batch(*MIXED, block_size)
    torch.testing.assert_close(batch.run(window).double(), batch.want(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_bf16_within_two_hundredths(block_size: int, window: int | None) -> None:
    """The same in bf16 is within 2e-2."""
    batch = Batch(*MIXED, block_size, torch.bfloat16)
    out = batch.run(window)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), batch.want(window), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 2, 40])
@pytest.mark.parametrize("context", [[7], [3, 3, 3], [1, 17, 16, 300, 5], [4000, *range(1, 30)]])
def test_decode_rows_equal_dense_attention(context: list[int], window: int | None) -> None:
    """One query a row, of equal lengths, of different ones, and so different that they are cut into batches."""
    batch = Batch(context, [1] * len(context), 16)
    torch.testing.assert_close(batch.run(window).double(), batch.want(window), rtol=1e-5, atol=1e-5)


def test_a_wide_spread_of_lengths_is_not_padded_to_the_longest() -> None:
    """Decode rows are cut into batches whose gathered keys stay within about twice the real ones, and none exceeds the
    bound.
    """
    batch = Batch([4000, *range(1, 30)], [1] * 30, 16)
    index = attention.index_of(batch.x, 16, None, torch.float32)
    assert len(index.decode) > 1
    assert sum(len(rows.slots) for rows in index.decode) <= 2 * sum(batch.context)
    batches = attention._batches(list(range(300)), [2000] * 300)
    assert sorted(row for rows in batches for row in rows) == list(range(300))
    assert all(len(rows) * 2048 <= attention.MOST_KEYS for rows in batches)


def test_the_order_of_rows_does_not_matter() -> None:
    """A row's result is the same wherever it stands in the batch."""
    batch = Batch(*MIXED, 4)
    rows = batch.run().split(batch.count)
    order = [3, 0, 4, 2, 1]
    starts = [c - n for c, n in zip(batch.context, batch.count, strict=True)]
    x, kv = by_hand(
        batch.kv, [[1] * batch.count[i] for i in order], [starts[i] for i in order], [batch.blocks[i] for i in order]
    )
    out = attention.paged_attention(torch.cat([batch.q[i] for i in order]), kv.layers[0], x, 0.3, None)
    torch.testing.assert_close(out, torch.cat([rows[i] for i in order]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("garbage", [10**9, -7])
def test_unused_table_entries_have_no_effect(garbage: int) -> None:
    """Entries past a row's context may hold anything."""
    batch = Batch(*MIXED, 4)
    want = batch.run()
    assert want.isfinite().all()
    table = batch.x.table.clone()
    for row, blocks in zip(batch.x.rows.tolist(), batch.blocks, strict=True):
        table[row, len(blocks) :] = garbage
    spoiled = with_table(batch.x, table)
    assert torch.equal(attention.paged_attention(torch.cat(batch.q), batch.kv.layers[0], spoiled, 0.3, None), want)


def with_table(x: Inputs, table: Tensor) -> Inputs:
    return Inputs(
        x.ids, x.positions, x.slots, x.rows, x.cu_seqlens_q, x.context, table, x.max_query, x.max_context, x.samples,
        x.last_rows, x.last_samples, x.host )  # fmt: skip


@pytest.mark.parametrize("counts", [[3, 2], [1, 1], [3, 1]])
def test_padding_rows_stay_finite_over_a_sink_of_nan(counts: list[int]) -> None:
    """GRF-02: rows of padding (row 0, block 0, which holds NaN) give zeros; the real rows are what they are without
    them.
    """
    batch = Batch([5, 3], counts, 4)
    want = batch.run()
    starts = [c - n for c, n in zip(batch.context, counts, strict=True)]
    pad = [[1], [1], [1, 1]]
    x, kv = by_hand(
        batch.kv,
        [*([1] * n for n in counts), *pad],
        [*starts, 0, 0, 0],
        [*batch.blocks, [0], [0], [0]],
        rows=[1, 2, 0, 0, 0],
    )
    assert kv.layers[0].k[0].isnan().all()
    q = torch.cat((*batch.q, torch.randn(4, N, D)))
    out = attention.paged_attention(q, kv.layers[0], x, 0.3, None)
    torch.testing.assert_close(out[: len(want)], want, rtol=1e-6, atol=1e-6)
    assert not out[len(want) :].any()


def test_rows_of_no_query_and_no_context_are_skipped() -> None:
    """KV-12 and GRF-02: a row that computes nothing gives nothing, one whose context is 0 gives zeros."""
    batch = Batch([5, 3], [1, 2], 4)
    lengths = attention.RowLengths(count=[1, 0, 2, 1], context=[5, 0, 3, 0], padding=[False, True, False, True])
    table = torch.full((4, 2), 10**9, dtype=torch.int32)
    for row, blocks in ((0, batch.blocks[0]), (2, batch.blocks[1])):
        table[row, : len(blocks)] = torch.tensor(blocks)
    index = attention.attention_index(table, lengths, 4, None, torch.float32)
    layer = batch.kv.layers[0]
    out = attention.attend_index(
        torch.cat((*batch.q, torch.randn(1, N, D))), layer.k, attention.values_of(layer), index, 0.3
    )
    torch.testing.assert_close(out[:3], batch.run(), rtol=1e-6, atol=1e-6)
    assert not out[3].any()


def test_a_context_past_its_table_is_refused_on_the_host() -> None:
    """KV-12: 9 keys over a table of two blocks of 4 raise before anything is read; 8 do not."""
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    attention.attention_index(table, attention.RowLengths([1], [8], [False]), 4, None, torch.float32)
    with pytest.raises(ValueError, match="9 keys"):
        attention.attention_index(table, attention.RowLengths([1], [9], [False]), 4, None, torch.float32)


def test_query_heads_share_kv_heads_in_order() -> None:
    """Query head n reads KV head n // (N // H): marked values come out at the right heads."""
    batch = Batch([3], [1], 4)
    batch.kv.layers[0].v.copy_(torch.arange(2.0).view(1, 1, 2, 1).expand_as(batch.kv.layers[0].v))
    assert batch.run()[0, :, 0].round().tolist() == [0, 0, 0, 1, 1, 1]


def test_writes_go_to_their_slots_and_nowhere_else() -> None:
    """write_kv changes exactly the slots named, converting to the cache's dtype."""
    kv = kvs.allocate([kvs.gqa(4, H, D, torch.bfloat16)], 3, 1, 1, CPU, math.nan)
    k, v = torch.randn(2, H, D), torch.randn(2, H, D)
    attention.write_kv(k, v, kv.layers[0], torch.tensor([13, 6]))
    for plane, x in ((kv.layers[0].k, k), (kv.layers[0].v, v)):
        assert torch.equal(plane[3, 1], x[0].bfloat16())
        assert torch.equal(plane[1, 2], x[1].bfloat16())
        assert int(plane.isfinite().sum()) == 2 * H * D


def test_a_latent_cache_has_no_paged_attention() -> None:
    """Asking for the values of a latent cache is a clear error."""
    kv: KvCache = kvs.allocate([kvs.mla(4, 8, 4, torch.float32)], 1, 1, 1, CPU)
    with pytest.raises(ValueError, match="caches latents"):
        attention.values_of(kv.layers[0])


def test_the_index_is_computed_once_a_step() -> None:
    """Layers of one window share one index; another window has its own."""
    batch = Batch([5, 3], [1, 2], 4)
    first = attention.index_of(batch.x, 4, None, torch.float32)
    assert attention.index_of(batch.x, 4, None, torch.float32) is first
    assert attention.index_of(batch.x, 4, 2, torch.float32) is not first
