"""FlashAttention 2.8 (the package flash-attn): attention over the paged cache. The rest is the reference's.

Its functions are called with named arguments only: positions changed between releases.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.attention import values_of
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops, composed, reference


def cu_seqlens_k(x: Inputs) -> Tensor:
    """[R + 1] int32: where each row's keys would begin and end, lay they one after the other. Once a step."""
    return x.memo.once(
        "cu_seqlens_k", x.context, lambda: functional.pad(x.context.cumsum(0, dtype=torch.int32), (1, 0))
    )


def flash_attn_ops(kernels: Any) -> Ops:
    """Ops whose attention is that of *kernels*, the imported module flash_attn.

    Works on bfloat16 and float16 over blocks of a multiple of 256 tokens (`choose` checks). A row of padding reads the
    sink: its output means nothing.
    """

    def paged_attention(q_TND: Tensor, kv: LayerKv, x: Inputs, scale: float, window: int | None) -> Tensor:
        sides = (-1, -1) if window is None else (window - 1, 0)
        table = tables_of(x, kv.layout.block_size)
        if x.max_query == 1 and len(q_TND) == len(x.rows):
            out = kernels.flash_attn_with_kvcache(
                q=q_TND.unsqueeze(1), k_cache=kv.k, v_cache=values_of(kv), cache_seqlens=x.context, block_table=table,
                softmax_scale=scale, causal=True, window_size=sides,
            )  # fmt: skip
            return out.squeeze(1)
        return kernels.flash_attn_varlen_func(
            q=q_TND.contiguous(), k=kv.k, v=values_of(kv), cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=cu_seqlens_k(x),
            max_seqlen_q=x.max_query, max_seqlen_k=x.max_context, dropout_p=0.0, softmax_scale=scale, causal=True,
            window_size=sides, block_table=table,
        )  # fmt: skip

    return composed("flash-attn", evolve(reference().primitives, paged_attention=paged_attention))
