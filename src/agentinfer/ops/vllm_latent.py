"""Latent attention of single queries by vLLM's compiled kernels: FlashAttention-3's form of it, and FlashMLA. Hopper.

Both attend with absorbed queries to the latents where they lie: the cache is passed as it is. What is around them is
ours: `absorb`, then `latent_write` (norm, rope, cache write, rope of the queries), then the kernel, then `values`.
Steps with several queries a row are left to the ops that this is put on top of.

========== ========= ======================================================================
kernel     block     splits of the keys
========== ========= ======================================================================
fa3-mla    16 or 32  decided on the device, in each call
flashmla   64        decided on the device in the first layer of a step, read by all others
========== ========= ======================================================================

Shapes: R rows, N heads, L latent width (512), P rope width (64), C = L + P.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.mla import LatentShape, latents_of
from agentinfer.ops.provide import Ops
from agentinfer.ops.vllm_ops import ATTENTION, fwd, missing, operator

FLASHMLA: Final = ("_flashmla_C", "_flashmla_C.abi3.so")
"""Namespace of the operators, and the library in the package's folder that brings them."""
LATENT_DIM: Final = 512
ROPE_DIM: Final = 64

Latents = Callable[[Tensor, LayerKv, Inputs, float], Tensor]
"""(q [R, N, C] absorbed and turned, kv, inputs, scale) -> what each head attends to, [R, N, L], new memory."""


def unsupported(shape: LatentShape) -> str | None:
    """Why neither kernel has a program for these heads; None if both have."""
    if (shape.latent_dim, shape.rope_dim) == (LATENT_DIM, ROPE_DIM):
        return None
    return f"kv_lora_rank {shape.latent_dim} and qk_rope_head_dim {shape.rope_dim} are not {LATENT_DIM} and {ROPE_DIM}"


def attend_fa3(q_RNC: Tensor, kv: LayerKv, x: Inputs, scale: float) -> Tensor:
    """`Latents` by FlashAttention-3: keys are the cached rope keys, values the latents, of which `q_v` is the query."""
    return fwd(
        q_RNC[..., LATENT_DIM:], kv.k[..., LATENT_DIM:], kv.k[..., :LATENT_DIM], x.cu_seqlens_q, 1, x.max_context,
        scale, None, q_v=q_RNC[..., :LATENT_DIM], page_table=tables_of(x, kv.layout.block_size), seqused_k=x.context,
        cu_seqlens_k=None, num_splits=0,
    )  # fmt: skip


class Schedule:
    """Which multiprocessor attends to which keys in a step. Mutable: empty until the first layer has attended."""

    __slots__ = ("parts", "splits")

    def __init__(self) -> None:
        self.parts: Tensor | None = None
        self.splits: Tensor | None = None


def attend_flashmla(q_RNC: Tensor, kv: LayerKv, x: Inputs, scale: float) -> Tensor:
    """`Latents` by FlashMLA."""
    schedule = x.memo.once("flashmla", x.context, Schedule)
    out, _, schedule.parts, schedule.splits = operator(FLASHMLA[0], "dense_decode_fwd")(
        q=q_RNC.unsqueeze(1), kcache=kv.k, head_size_v=LATENT_DIM, seqlens_k=x.context,
        block_table=tables_of(x, kv.layout.block_size), softmax_scale=scale, is_causal=False,
        tile_scheduler_metadata=schedule.parts, num_splits=schedule.splits, out_=None,
    )  # fmt: skip
    return out.squeeze(1)


KERNELS: Final[Mapping[str, tuple[Latents, tuple[str, str], str]]] = MappingProxyType(
    {
        "fa3-mla": (attend_fa3, ATTENTION, "fwd"),
        "flashmla": (attend_flashmla, FLASHMLA, "dense_decode_fwd"),
    }
)
"""Of each provider: its kernel, where the operator is, and what it is called."""


def with_latent(ops: Ops, name: str, *, pdl: bool = False) -> Ops:
    """*ops*, whose attend_latent leaves steps of one query a row to the kernel *name* of KERNELS.

    Asks the host nothing, so that a graph can capture it. *pdl*: programmatic dependent launch of our own kernels
    around it. Raises InvalidSetting if vllm does not bring the kernel; the call, ValueError for a cache of keys and
    values.
    """
    from agentinfer.ops.kernels.attend_latent import absorb, values
    from agentinfer.ops.kernels.latent_write import latent_write

    attend_latents, library, function = KERNELS[name]
    problem = missing(*library, function)
    if problem is not None:
        raise InvalidSetting("ops", f"{name}: {problem}")

    def attend(
        q_TX: Tensor, latent_TC: Tensor, kv: LayerKv, x: Inputs, shape: LatentShape, cos_sin: Tensor,
        kv_norm_L: Tensor, kv_b: Tensor, scale: float, latent_eps: float,
    ) -> Tensor:  # fmt: skip
        if x.max_query != 1 or len(x.ids) != len(x.rows):
            return ops.attend_latent(q_TX, latent_TC, kv, x, shape, cos_sin, kv_norm_L, kv_b, scale, latent_eps)
        latents_of(kv)  # raises
        q = absorb(q_TX, kv_b, shape.nope_dim, more=shape.rope_dim, pdl=pdl)
        latent_write(
            latent_TC, kv_norm_L, cos_sin, x.positions, x.slots, kv.k, latent_eps, interleaved=shape.interleaved,
            q_TX=q_TX, out_TNC=q,
        )  # fmt: skip
        return values(attend_latents(q, kv, x, scale), kv_b, shape.nope_dim, x.context, pdl=pdl)

    return evolve(ops, name=name, attend_latent=attend)
