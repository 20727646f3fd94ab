"""torch's own attention over the paged cache, `torch.nn.attention.varlen.varlen_attn` (torch >= 2.13, CUDA only). The
rest is the reference's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.attention import values_of
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops, composed, reference


def paged_varlen_attn() -> Callable[..., Any]:
    """torch's function. Raises InvalidSetting if this torch has none that takes a block table."""
    try:
        function = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        function = None
    if function is None or not {"block_table", "seqused_k"} <= set(inspect.signature(function).parameters):
        raise InvalidSetting("ops", "torch: its varlen_attn takes block tables from torch 2.13 on")
    return function


def torch_ops(varlen_attn: Callable[..., Any]) -> Ops:
    """Ops whose attention is *varlen_attn*, torch's (`paged_varlen_attn`).

    Works on bfloat16 and float16 over blocks of a multiple of 256 tokens (`choose` checks). A row of padding reads the
    sink: its output means nothing.
    """

    def paged_attention(q_TND: Tensor, kv: LayerKv, x: Inputs, scale: float, window: int | None) -> Tensor:
        return varlen_attn(
            query=q_TND.contiguous(), key=kv.k, value=values_of(kv), cu_seq_q=x.cu_seqlens_q, cu_seq_k=None,
            max_q=x.max_query, max_k=x.max_context, scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # nothing to the right is causal
            enable_gqa=True, seqused_k=x.context, block_table=tables_of(x, kv.layout.block_size),
        )  # fmt: skip

    return composed("torch", evolve(reference().primitives, paged_attention=paged_attention))
