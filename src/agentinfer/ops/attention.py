"""Attention over the paged KV cache, for any mix of rows: the torch reference.

A row computes `count` positions and attends to `context` keys, its last position to all of them. One query a row
(decode) goes batched; several (a prompt, a chunk of one, drafts) go one row after the other.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, L keys, B tokens a block, C table columns.

Only slots that hold a visible key are ever read: keys past a row's context are looked up at its first key and masked.
So what unused table entries and unwritten slots hold (NaN, ids out of range) has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.inputs import Inputs, check_tables, host_rows, tables_of
from agentinfer.ops.kv import LayerKv

MOST_KEYS = 1 << 18
"""Keys gathered at once for a decode batch: bounds the memory of the copy."""


@frozen
class HeadShape:
    """The attention heads of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@frozen(eq=False)
class DecodeRows:
    """Rows of one query each, attended in one batch of G rows."""

    at: Tensor | None
    """[G] their flat positions; None: all positions of the step, in order."""
    slots: Tensor
    """[G * L] the slot of every key."""
    length: int
    """L: the longest of them."""
    mask: Tensor | None
    """[G, 1, 1, L] 0 or -inf, to be added; None: all keys are visible."""
    padding: Tensor | None
    """[G, 1, 1] True where the output is to be zero; None: nowhere."""


@frozen(eq=False)
class ChunkRow:
    """A row of several queries."""

    first: int
    """Its first flat position."""
    count: int
    slots: Tensor
    """[L] the slot of every key."""
    mask: Tensor | None
    """[count, L] 0 or -inf, to be added; None: position i sees keys 0 .. i."""
    padding: bool


@frozen(eq=False)
class AttentionIndex:
    """Where the keys of one step lie, for layers of one window and dtype. Computed once a step."""

    decode: tuple[DecodeRows, ...]
    chunks: tuple[ChunkRow, ...]


@frozen(eq=False)
class RowLengths:
    """The rows of a step on the host."""

    count: Sequence[int]
    context: Sequence[int]
    padding: Sequence[bool]


def write_kv(k_THD: Tensor, v_THD: Tensor, kv: LayerKv, slots_T: Tensor) -> None:
    """Write the keys and values of T positions to their slots, in place. Of positions that share a slot (the sink) any
    one wins.
    """
    scatter_kv(k_THD, v_THD, kv.k, values_of(kv), slots_T)


def scatter_kv(k_THD: Tensor, v_THD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """`write_kv` on plain tensors: the caches are [blocks, B, H, D]."""
    k_cache.flatten(0, 1).index_copy_(0, slots_T, k_THD.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slots_T, v_THD.to(v_cache.dtype))


def values_of(kv: LayerKv) -> Tensor:
    """The value tensor of a layer that has one. Raises ValueError for a latent cache."""
    if kv.v is None:
        raise ValueError(f"layer {kv.layer} caches latents ({kv.layout.kind}); paged attention needs keys and values")
    return kv.v


def key_slots(table_GC: Tensor, low_G: Tensor, context_G: Tensor, length: int, block_size: int) -> Tensor:
    """Slots of keys low .. low + length - 1 of each row, [G, length]; keys past its context are replaced by key *low*.

    ========= =============================
    key j     block table[j // B], offset j % B
    ========= =============================
    """
    low = low_G.unsqueeze(-1)
    key = low + torch.arange(length, device=table_GC.device)
    key = torch.where(key < context_G.unsqueeze(-1), key, low)
    block = table_GC.gather(1, torch.div(key, block_size, rounding_mode="floor")).to(torch.int64)
    return block * block_size + key % block_size


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _decode_rows(
    table_RC: Tensor,
    members: list[int],
    low: list[int],
    lengths: RowLengths,
    at: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
) -> DecodeRows:
    device = table_RC.device
    context = [max(1, lengths.context[row]) for row in members]
    length = max(c - a for c, a in zip(context, low, strict=True))
    low_G, context_G = torch.tensor((low, context), dtype=torch.int64).to(device)
    table = table_RC if len(members) == len(table_RC) else table_RC.index_select(0, torch.tensor(members).to(device))
    padding = None
    if any(lengths.padding[row] for row in members):
        padding = torch.tensor([lengths.padding[row] for row in members]).to(device)
        table = table.masked_fill(padding.unsqueeze(-1), 0)
        padding = padding.view(-1, 1, 1)
    slots = key_slots(table, low_G, context_G, length, block_size)
    mask = None
    if any(c - a < length for c, a in zip(context, low, strict=True)):
        hidden = torch.arange(length, device=device) >= (context_G - low_G).unsqueeze(-1)
        mask = _additive(hidden, dtype).view(len(members), 1, 1, length)
    return DecodeRows(at, slots.view(-1), length, mask, padding)


def _chunk_row(
    table_C: Tensor,
    first: int,
    count: int,
    context: int,
    padding: bool,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> ChunkRow:
    start = max(0, context - count)
    low = 0 if window is None else max(0, start - window + 1)
    device = table_C.device
    table = torch.zeros_like(table_C) if padding else table_C
    length = max(1, context - low)
    bounds = torch.tensor((low, max(1, context)), dtype=torch.int64).to(device)
    slots = key_slots(table.unsqueeze(0), bounds[:1], bounds[1:], length, block_size).view(-1)
    if start == 0 and length == count and (window is None or window >= count):
        return ChunkRow(first, count, slots, None, padding)
    key = torch.arange(low, low + length, device=device)
    query = torch.arange(context - count, context, device=device).unsqueeze(-1)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return ChunkRow(first, count, slots, _additive(hidden, dtype), padding)


def _batches(members: list[int], lengths: list[int]) -> list[list[int]]:
    """Cut decode rows so that padding to the longest at most about doubles the keys, and none gathers more than
    MOST_KEYS.
    """
    longest = max(lengths)
    if len(members) * longest <= min(MOST_KEYS, max(4096, 2 * sum(lengths))):
        return [members]
    ordered = sorted(zip(lengths, members, strict=True))
    batches: list[list[int]] = []
    edge = 0
    for length, row in ordered:
        if not batches or length > edge or (len(batches[-1]) + 1) * edge > MOST_KEYS:
            edge = 1 << (length - 1).bit_length()
            batches.append([])
        batches[-1].append(row)
    return [sorted(batch) for batch in batches]


def attention_index(
    table_RC: Tensor, lengths: RowLengths, block_size: int, window: int | None, dtype: torch.dtype
) -> AttentionIndex:
    """Where every row finds its keys. *window*: a position sees itself and at most window - 1 keys before it; None:
    all.

    Raises ValueError if a context exceeds the table.
    """
    check_tables(lengths.context, table_RC.shape[1], block_size)
    first: list[int] = []
    flat = 0
    for count in lengths.count:
        first.append(flat)
        flat += count
    single = [row for row, count in enumerate(lengths.count) if count == 1]
    low = {row: 0 if window is None else max(0, lengths.context[row] - window) for row in single}
    decode: list[DecodeRows] = []
    if single:
        for batch in _batches(single, [max(1, lengths.context[row]) - low[row] for row in single]):
            at = None if len(batch) == flat else torch.tensor([first[row] for row in batch]).to(table_RC.device)
            decode.append(_decode_rows(table_RC, batch, [low[row] for row in batch], lengths, at, block_size, dtype))
    chunks = tuple(
        _chunk_row(
            table_RC[row], first[row], count, lengths.context[row], lengths.padding[row], block_size, window, dtype
        )
        for row, count in enumerate(lengths.count)
        if count > 1
    )
    return AttentionIndex(tuple(decode), chunks)


def index_of(x: Inputs, block_size: int, window: int | None, dtype: torch.dtype) -> AttentionIndex:
    """The AttentionIndex of a step, computed once for all layers of one window and dtype."""

    def make() -> AttentionIndex:
        host = host_rows(x)
        padding = [row == 0 or context <= 0 for row, context in zip(host.rows, host.context, strict=True)]
        lengths = RowLengths(host.count, host.context, padding)
        return attention_index(tables_of(x, block_size), lengths, block_size, window, dtype)

    return x.memo.once(("attention", block_size, window, dtype), x.table, make)


Gather = Callable[[Tensor], tuple[Tensor, Tensor]]
"""slots [n] -> the keys [n, H, D] and values [n, H, V] there."""


def _attend_decode(q_GND: Tensor, gather: Gather, rows: DecodeRows, scale: float) -> Tensor:
    size = len(q_GND)
    keys, values = gather(rows.slots)
    heads = keys.shape[1]
    q = q_GND.view(
        size, heads, -1, q_GND.shape[-1]
    )  # with one position each, the query heads of a KV head are its queries
    k = keys.view(size, rows.length, heads, -1).transpose(1, 2).to(q_GND.dtype)
    v = values.view(size, rows.length, heads, -1).transpose(1, 2).to(q_GND.dtype)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=rows.mask, scale=scale).flatten(1, 2)
    return out if rows.padding is None else out.masked_fill(rows.padding, 0)


def _attend_chunk(q_QND: Tensor, gather: Gather, row: ChunkRow, scale: float) -> Tensor:
    keys, values = gather(row.slots)
    if row.padding:
        return q_QND.new_zeros((*q_QND.shape[:-1], values.shape[-1]))
    k = keys.transpose(0, 1).unsqueeze(0).to(q_QND.dtype)
    v = values.transpose(0, 1).unsqueeze(0).to(q_QND.dtype)
    q = q_QND.transpose(0, 1).unsqueeze(0)
    grouped = k.shape[1] != q.shape[1]
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scale, enable_gqa=grouped
    )
    return out.squeeze(0).transpose(0, 1)


def attend_rows(q_TND: Tensor, gather: Gather, index: AttentionIndex, scale: float, width: int) -> Tensor:
    """Attention of all rows of *index* over what *gather* gives for their slots; values are *width* wide. [T, N,
    width], new memory; rows that *index* leaves out hold anything.
    """
    if len(index.decode) == 1 and index.decode[0].at is None:
        return _attend_decode(q_TND, gather, index.decode[0], scale)
    out = q_TND.new_empty((*q_TND.shape[:-1], width))
    for rows in index.decode:
        if rows.at is not None:
            out.index_copy_(0, rows.at, _attend_decode(q_TND.index_select(0, rows.at), gather, rows, scale))
    for row in index.chunks:
        span = slice(row.first, row.first + row.count)
        out[span] = _attend_chunk(q_TND[span], gather, row, scale)
    return out


def attend_index(q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, scale: float) -> Tensor:
    """Attention of all rows of *index* over caches of [blocks, B, H, D]. [T, N, D], new memory."""
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        return keys.index_select(0, slots), values.index_select(0, slots)

    return attend_rows(q_TND, gather, index, scale, v_cache.shape[-1])


def paged_attention(q_TND: Tensor, kv: LayerKv, x: Inputs, scale: float, window: int | None) -> Tensor:
    """Causal attention of every row over its keys in *kv*, which must hold this step's too. [T, N, D].

    The causal mask is aligned to the end of the keys. Query head n reads KV head n // (N // H). Rows of padding give
    zeros.
    Raises ValueError if a context exceeds the table.
    """
    index = index_of(x, kv.layout.block_size, window, q_TND.dtype)
    return attend_index(q_TND, kv.k, values_of(kv), index, scale)
