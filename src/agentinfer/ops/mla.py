"""Multi-head latent attention over the paged cache: the torch reference, float32 inside.

A token's cache is its latent, after the norm, and its rope key, after rope: once for all heads. `kv_b` makes a head's
key and value of a latent. Attention has two forms, equal but for rounding:

============ ==========================================================================================
materialized keys and values of all heads are made of the latents first
absorbed     the keys' part of kv_b goes into the query, the values' part into the output: what is attended
             to is the latents themselves, one key and value a token, whatever the heads
============ ==========================================================================================

Making keys costs as much for one query as for many, attending to latents more for every query: chunks are
materialized from some length on, single queries never.

Shapes: T positions, N heads, U unrotated and P rotated numbers of a query or key head, L latent width, C = L + P what
is cached of a token, O value width of a head, J keys.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.attention import AttentionIndex, attend_rows, index_of
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import LayerKv


@frozen
class LatentShape:
    """The heads of latent attention on this rank."""

    num_heads: int
    nope_dim: int
    """U: numbers of a query or key head that are not rotated. They come first."""
    rope_dim: int
    """P: those that are. Of keys shared by all heads."""
    latent_dim: int
    """L."""
    value_dim: int
    """O: numbers of a value head."""
    interleaved: bool = True
    """Rope turns the pairs (2i, 2i + 1), not (i, i + P / 2)."""

    @property
    def query_dim(self) -> int:
        """U + P: numbers of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """C = L + P: numbers that are cached of a token."""
        return self.latent_dim + self.rope_dim


def latents_of(kv: LayerKv) -> Tensor:
    """The latents of a layer by slot, [slots, 1, C]. Raises ValueError for a cache of keys and values."""
    if kv.layout.kind != "mla":
        raise ValueError(f"layer {kv.layer} caches keys and values ({kv.layout.kind}), not latents")
    return kv.k.flatten(0, 1)


def write_latent(latent_TL: Tensor, rope_TP: Tensor, kv: LayerKv, slots_T: Tensor) -> None:
    """Write what is cached of T positions to their slots, in place: latents after their norm, rope keys after rope."""
    cache = latents_of(kv)
    row = torch.cat((latent_TL, rope_TP), dim=-1).to(cache.dtype)
    cache.index_copy_(0, slots_T, row.unsqueeze(1))


def materialized(shape: LatentShape, queries: int) -> bool:
    """Whether making keys and values is less work for a row of *queries* than attending to latents."""
    more = 2 * shape.latent_dim - shape.nope_dim - shape.value_dim  # for one query and key of a head
    return queries * more > shape.latent_dim * (shape.nope_dim + shape.value_dim)


def attend_absorbed(
    q_TNQ: Tensor, cache_SC: Tensor, index: AttentionIndex, shape: LatentShape, kv_b: Tensor, scale: float
) -> Tensor:
    """Attention of the rows of *index* to the latents themselves. [T, N, O] float32; other rows hold anything.

    *q* [T, N, U + P] after rope; *cache* [slots, 1, C]; *kv_b* [N, U + O, L].
    """
    wide, q_NTQ = kv_b.to(torch.float32), q_TNQ.to(torch.float32).transpose(0, 1)
    to_key_NUL, to_value_NOL = wide[:, : shape.nope_dim], wide[:, shape.nope_dim :]
    inner_NTL = torch.bmm(q_NTQ[..., : shape.nope_dim], to_key_NUL)
    q_TNC = torch.cat((inner_NTL, q_NTQ[..., shape.nope_dim :]), dim=-1).transpose(0, 1).contiguous()

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        latents = cache_SC.index_select(0, slots)
        return latents, latents[..., : shape.latent_dim]

    out_TNL = attend_rows(q_TNC, gather, index, scale, shape.latent_dim)
    return torch.bmm(out_TNL.transpose(0, 1), to_value_NOL.transpose(1, 2)).transpose(0, 1)


def attend_materialized(
    q_TNQ: Tensor, cache_SC: Tensor, index: AttentionIndex, shape: LatentShape, kv_b: Tensor, scale: float
) -> Tensor:
    """As `attend_absorbed`, to keys and values that are made of the latents."""
    weight_XL = kv_b.to(torch.float32).flatten(0, 1)

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        latents = cache_SC.index_select(0, slots).squeeze(1).to(torch.float32)
        made = functional.linear(latents[:, : shape.latent_dim], weight_XL).view(len(slots), *kv_b.shape[:2])
        shared = latents[:, shape.latent_dim :].unsqueeze(1).expand(-1, shape.num_heads, -1)
        return torch.cat((made[..., : shape.nope_dim], shared), dim=-1), made[..., shape.nope_dim :]

    return attend_rows(q_TNQ.to(torch.float32), gather, index, scale, shape.value_dim)


def latent_attention(
    q_TNQ: Tensor, kv: LayerKv, x: Inputs, shape: LatentShape, kv_b: Tensor, scale: float
) -> Tensor:  # fmt: skip
    """Causal attention of every row over its latents in *kv*, which must hold this step's too. [T, N, O] of q's dtype.

    Arguments as of `attend_absorbed`. Each row takes the form that is less work. Rows of padding give zeros.
    Raises ValueError if a context exceeds the table, and for a cache of keys and values.
    """
    cache, index = latents_of(kv), index_of(x, kv.layout.block_size, None, torch.float32)
    long = tuple(row for row in index.chunks if materialized(shape, row.count))
    if not long:
        return attend_absorbed(q_TNQ, cache, index, shape, kv_b, scale).to(q_TNQ.dtype)
    out = attend_materialized(q_TNQ, cache, AttentionIndex((), long), shape, kv_b, scale)
    if len(long) < len(index.chunks) or index.decode:
        short = tuple(row for row in index.chunks if not materialized(shape, row.count))
        other = attend_absorbed(q_TNQ, cache, evolve(index, chunks=short), shape, kv_b, scale)
        for row in long:
            other[row.first : row.first + row.count] = out[row.first : row.first + row.count]
        out = other
    return out.to(q_TNQ.dtype)
