"""Ops of our own Triton kernels: the default on a GPU.

The residual is float32 and never rounded; a `Stream` has in pending_TD the partial sums ([P, T, D]) that the next norm
adds to it. By the number of rows a weight is multiplied by one of three kernels:

===== ============================================================================
rows  product
===== ============================================================================
1     gemv: norm, gate and residual are part of it, so nothing is ever pending
2-64  gemm by TMA, in partial sums where a norm follows (two bytes a number only);
      of narrow models up to 128
more  cuBLAS, and small kernels between
===== ============================================================================

Weights of 8 bits take `scaled_gemm` for any number of rows but one.

Steps of one query a row go to `attend_decode`, others to *ragged*; latent attention is in `latent`, experts in
`experts`. Between our own kernels launches are programmatic (on Hopper and later), as `kernels/embed.py` explains;
cuBLAS and other providers take no part and end the chain.

Shapes: T positions, S samples, D model width, X local qkv width, F local gate width, V local vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from agentinfer.ops import experts, latent, linear
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.comm import Group
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kernels import add_norm, silu
from agentinfer.ops.kernels.attend_decode import COUNTERS, attend_decode
from agentinfer.ops.kernels.edit import edit_rows, enter_rows
from agentinfer.ops.kernels.embed import embed
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.launch import launches_dependents
from agentinfer.ops.kernels.sample import sample_parts, sample_tokens
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.products import Launch, by_gemm, gated, gemm, product
from agentinfer.ops.provide import Attend, Ops, Primitives, Stream, reference
from agentinfer.ops.ragged import attend_ragged, check_heads
from agentinfer.ops.sample import on_device
from agentinfer.ops.scaled import Weight
from agentinfer.ops.streams import added, norm, over_ranks, summed

GEMM_MOST_ROWS = 64
"""Beyond, cuBLAS is faster."""
NARROW_MOST_ROWS = 128
"""The same for weights of at most NARROW numbers."""


def _embed(run: Launch, ids_T: Tensor, weight_VD: Tensor, group: Group) -> Stream:
    if group.size == 1:
        return Stream(embed(ids_T, weight_VD, pdl=run.pdl), None)
    return Stream(linear.embedding(ids_T, weight_VD, group).to(torch.float32), None)


def _norm_qkv(
    run: Launch, stream: Stream, norm_D: Tensor, weight_XD: Weight, bias_X: Tensor | None, eps: float
) -> tuple[Tensor, Stream]:
    if len(stream.residual_TD) == 1 and stream.pending_TD is None:
        x = gemv(stream.residual_TD, weight_XD, norm_D.dtype, norm_K=norm_D, eps=eps, bias=bias_X, pdl=run.pdl)
        return x, stream
    normed, stream = norm(stream, norm_D, norm_D.dtype, eps, pdl=run.pdl)
    return product(run, normed, weight_XD, bias_X), stream


def _norm_gate_up(
    run: Launch, stream: Stream, norm_D: Tensor, weight: Weight, bias: Tensor | None, eps: float
) -> tuple[Tensor, Stream]:
    rows, dtype = len(stream.residual_TD), norm_D.dtype
    if rows == 1 and stream.pending_TD is None:
        act = gemv(
            stream.residual_TD, weight, dtype, norm_K=norm_D, eps=eps, bias=bias, gated=True, pdl=run.pdl
        )  # fmt: skip
        return act, stream
    normed, stream = norm(stream, norm_D, dtype, eps, pdl=run.pdl)
    return gated(run, normed, weight, bias), stream


def _row_add(run: Launch, x: Tensor, weight: Weight, bias_D: Tensor | None, stream: Stream, group: Group) -> Stream:
    """The next sums of the stream, whatever it had pending added to the residual first: pending is one product's."""
    residual = added(stream, x.dtype)
    if group.size > 1 and bias_D is not None:  # which is added once, after the sum
        y = group.all_reduce_sum(product(run, x, weight, None))
        return Stream(residual, (y + bias_D).unsqueeze(0))
    if group.size == 1 and len(x) == 1:
        return Stream(gemv(x, weight, torch.float32, bias=bias_D, add_to=residual, pdl=run.pdl), None)
    if by_gemm(run, x, weight):
        parts = gemm(x, weight, torch.float32, bias=bias_D, partial=True, pdl=run.pdl)
    else:
        parts = product(run, x, weight, bias_D).unsqueeze(0)
    return over_ranks(residual, parts, x.dtype, group)


def _norm_head(
    run: Launch, stream: Stream, samples_S: Tensor, norm_D: Tensor, weight_VD: Tensor, eps: float, group: Group,
    vocab_size: int,
) -> Tensor:  # fmt: skip
    wide = torch.float32
    residual, pending, _ = summed(stream, weight_VD.dtype)
    if len(residual) == len(samples_S) == 1 and pending is None:
        logits = gemv(residual, weight_VD, wide, norm_K=norm_D, eps=eps, pdl=run.pdl)
    else:
        x = add_norm.add_norm(
            residual, pending, norm_D, eps, weight_VD.dtype, rows=samples_S, pdl=run.pdl
        )  # fmt: skip
        logits = _wide_product(run, x, weight_VD)
    return group.all_gather_last_dim(logits)[:, :vocab_size]


def _wide_product(run: Launch, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T in float32, not rounded in between where the device can."""
    if len(x) == 1:
        return gemv(x, weight, torch.float32, pdl=run.pdl)
    if by_gemm(run, x, weight):
        return gemm(x, weight, torch.float32, pdl=run.pdl)
    if x.dtype != torch.float32 and x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t()).to(torch.float32)


def _attend(
    run: Launch, ragged: Attend, qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    if x.max_query != 1 or len(x.ids) != len(x.rows):
        return ragged(qkv_TX, kv, x, shape, cos_sin, q_norm, k_norm, eps, scale, window)
    check_heads(shape, kv, qkv_TX.dtype, cos_sin, q_norm, k_norm)
    return attend_decode(
        qkv_TX, kv.k, values_of(kv), x.table, x.rows, x.context, x.slots, shape.num_heads, cos_sin, q_norm, k_norm,
        eps, scale, window, run.counters, pdl=run.pdl,
    )  # fmt: skip


def _norm_latent(
    run: Launch, stream: Stream, norm_D: Tensor, down_AD: Weight, q_norm: Tensor | None, q_up: Weight | None,
    shape: LatentShape, eps: float, latent_eps: float,
) -> tuple[Tensor, Tensor, Stream]:  # fmt: skip
    down, stream = _norm_qkv(run, stream, norm_D, down_AD, None, eps)
    q, latents = down[:, : -shape.cached_dim], down[:, -shape.cached_dim :]
    if (q_norm is None) != (q_up is None):
        raise ValueError("a query's latent is normed and taken up, or there is none; one of two weights is missing")
    if q_norm is not None and q_up is not None:
        q = product(run, add_norm.rms_norm(q.contiguous(), q_norm, latent_eps), q_up, None)
    return q, latents, stream


def launch_on(device: torch.device, *, pdl: bool | None = None, gemm_rows: int | None = None) -> Launch:
    """How kernels are launched on *device*; arguments as of `triton_ops`."""
    hopper = launches_dependents(device)
    return Launch(
        pdl=hopper if pdl is None else pdl,
        gemm_rows=(GEMM_MOST_ROWS if hopper else 0) if gemm_rows is None else gemm_rows,
        narrow_rows=(NARROW_MOST_ROWS if hopper else 0) if gemm_rows is None else gemm_rows,
        counters=torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def triton_ops(
    device: torch.device,
    *,
    ragged: Attend = attend_ragged,
    pdl: bool | None = None,
    gemm_rows: int | None = None,
) -> Ops:
    """Ops of Triton kernels on *device*, for one stream at a time. The residual between calls is float32, and calls
    may add to that of the stream they are given in place: only the stream that they return may be used afterwards.

    *ragged* attends steps with several queries a row. *pdl*: programmatic dependent launch; None: where the device can.
    *gemm_rows*: most rows for our own product of several rows; None: 64 where the device has TMA.
    Calls raise InvalidSetting for heads, cache or dtype that the kernels have no program for.
    """
    run = launch_on(device, pdl=pdl, gemm_rows=gemm_rows)
    plain = reference().primitives
    choose_rows = partial(sample_tokens, pdl=run.pdl)
    return Ops(
        name="triton",
        embed=partial(_embed, run),
        norm_qkv=partial(_norm_qkv, run),
        attend=partial(_attend, run, ragged),
        out_add=partial(_row_add, run),
        norm_gate_up=partial(_norm_gate_up, run),
        down_add=partial(_row_add, run),
        norm_head=partial(_norm_head, run),
        norm_latent=partial(_norm_latent, run),
        attend_latent=partial(latent.attend, pdl=run.pdl),
        norm_route=partial(experts.norm_route, run),
        experts_add=partial(experts.experts_add, run),
        primitives=Primitives(
            rms_norm=add_norm.rms_norm,
            fused_add_rms_norm=add_norm.fused_add_rms_norm,
            silu_and_mul=silu.silu_and_mul,
            rotary_embedding=plain.rotary_embedding,
            write_kv=plain.write_kv,
            paged_attention=plain.paged_attention,
            linear=plain.linear,
        ),
        sample=on_device(choose_rows),
        sample_rows=choose_rows,
        part_rows=partial(sample_parts, pdl=run.pdl),
        edit_rows=edit_rows,
        enter_rows=enter_rows,
    )
