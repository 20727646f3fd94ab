"""vLLM's compiled kernels: FlashAttention-3 over the paged cache, norms, rope, activation, KV write. Hopper, 16 bits.

The kernels are torch operators in shared libraries of the package, which are loaded by themselves: `import vllm` takes
seconds and sets up logging, processes and environment variables, none of which a kernel needs. Arguments are named, as
the operators' schemas name them (vllm 0.26): a version with other names is refused by torch, not called wrongly.

Shapes: T positions, R rows, N query heads, H KV heads, D head dim, X = (N + 2 H) D, B tokens a block, C table columns.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import linear
from agentinfer.ops.attention import HeadShape, values_of
from agentinfer.ops.inputs import Inputs, tables_of
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops, Primitives, composed, split_heads

ATTENTION: Final = ("_vllm_fa3_C", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
"""Namespace of the operators, and the library in the package's folder that brings them."""
SMALL: Final = ("_C", "_C_stable_libtorch.abi3.so")
CACHE: Final = ("_C_cache_ops", SMALL[1])


def operator(namespace: str, name: str) -> Any:
    """An operator of a library that was loaded."""
    return getattr(getattr(cast(Any, torch.ops), namespace), name)


def missing(namespace: str, library: str, name: str) -> str | None:
    """Load the operator *name*; None if it is there now, else why not."""
    if hasattr(getattr(cast(Any, torch.ops), namespace), name):
        return None
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vllm is not installed"
    path = Path(next(iter(spec.submodule_search_locations))) / library
    if not path.is_file():
        return f"this vllm has no {library}"
    try:
        cast(Any, torch.ops).load_library(str(path))
    except OSError as error:
        return f"{library} does not fit torch {torch.__version__}: {error}"
    return None if hasattr(getattr(cast(Any, torch.ops), namespace), name) else f"{library} has no {name}"


def load_attention() -> None:
    """Make FlashAttention-3 callable. Raises InvalidSetting if vllm does not bring it."""
    problem = missing(*ATTENTION, "fwd")
    if problem is not None:
        raise InvalidSetting("ops", f"vllm: {problem}")


def load_all() -> None:
    """Make every kernel callable that `vllm_ops` uses. Raises InvalidSetting for the first that is not there."""
    load_attention()
    wanted = [(*SMALL, name) for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")]
    for namespace, library, name in (*wanted, (*CACHE, "reshape_and_cache_flash")):
        problem = missing(namespace, library, name)
        if problem is not None:
            raise InvalidSetting("ops", f"vllm: {problem}")


def attend_fa3(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table_RC: Tensor,
    cu_seqlens_q: Tensor,
    context_R: Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window: int | None,
    num_splits: int = 0,
) -> Tensor:
    """Causal attention of any mix of rows, [T, N, D], new memory. *max_query*, *max_context*: upper bounds, so it can
    be captured. *num_splits*: pieces that the keys of a row are cut into; 0: by FlashAttention's own rule.

    q is bfloat16 or float16; the caches are [blocks, B, H, D] of its dtype, B a multiple of 16; table, cu_seqlens_q and
    context int32. The causal mask is aligned to the end of the keys. A row of padding reads the sink: its output means
    nothing.
    """
    return fwd(
        q_TND, k_cache, v_cache, cu_seqlens_q, max_query, max_context, scale, window,
        page_table=table_RC, seqused_k=context_R, cu_seqlens_k=None, num_splits=num_splits,
    )  # fmt: skip


def attend_fa3_packed(
    q_TND: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, max_query: int, scale: float, window: int | None
) -> Tensor:
    """`attend_fa3` of rows that have no keys but those of their own positions: these are read where they were computed,
    whole tiles at a time, and not by blocks.
    """
    return fwd(
        q_TND, k_THD, v_THD, cu_seqlens, max_query, max_query, scale, window,
        page_table=None, seqused_k=None, cu_seqlens_k=cu_seqlens, num_splits=0,
    )  # fmt: skip


def fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_query: int, max_context: int, scale: float,
    window: int | None, *, q_v: Tensor | None = None, **keys: Tensor | int | None,
) -> Tensor:  # fmt: skip
    """FlashAttention-3's operator. *keys*: where the keys of each row are; *q_v*: a part of the query, whose keys are
    the values.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    return operator("_vllm_fa3_C", "fwd")(
        q=q, k=k, v=v, k_new=None, v_new=None, q_v=q_v, out=None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=None,
        seqused_q=None, max_seqlen_q=max_query, max_seqlen_k=max_context, kv_batch_idx=None, leftpad_k=None,
        rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=scale, is_causal=True, window_size_left=left, window_size_right=right, softcap=0.0,
        is_rotary_interleaved=True, scheduler_metadata=None, pack_gqa=None, sm_margin=0, s_aux=None, cp_world_size=1,
        cp_rank=0, cp_tot_seqused_k=None, **keys,
    )[0]  # fmt: skip


def fresh(x: Inputs) -> bool:
    """Whether every row of the step begins at its first position, as prompts do that nothing is known of. Once a step;
    False in a captured graph.
    """
    host = x.host
    return host is not None and x.memo.once("fresh", x.context, lambda: not any(host.start) and all(host.rows))


def paged_attention(q_TND: Tensor, kv: LayerKv, x: Inputs, scale: float, window: int | None) -> Tensor:
    """`attend_fa3` of a step: attention.paged_attention, but for rows of padding."""
    table = tables_of(x, kv.layout.block_size)
    return attend_fa3(
        q_TND, kv.k, values_of(kv), table, x.cu_seqlens_q, x.context, x.max_query, x.max_context, scale, window
    )  # fmt: skip


def with_fa3(ops: Ops, decode_from: int | None = None) -> Ops:
    """*ops* (of Triton), whose attend leaves steps with several queries a row to FlashAttention-3, and those of one
    query a row too where `max_context` is *decode_from* or more. Norm, rope and KV write stay one Triton kernel.

    In a captured graph max_context is the longest that a sequence may become, so there it decides for all replays.
    Raises InvalidSetting if vllm does not bring the kernel.
    """
    from agentinfer.ops.kernels.qk_rope_write import qk_rope_write
    from agentinfer.ops.ragged import check_heads

    load_attention()

    def attend(
        qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        if x.max_query == 1 and (decode_from is None or x.max_context < decode_from):
            return ops.attend(qkv_TX, kv, x, shape, cos_sin, q_norm, k_norm, eps, scale, window)
        check_heads(shape, kv, qkv_TX.dtype, cos_sin, q_norm, k_norm)
        whole = fresh(x)
        keys = torch.empty((len(qkv_TX), *kv.k.shape[2:]), dtype=qkv_TX.dtype, device=qkv_TX.device) if whole else None
        q = qk_rope_write(
            qkv_TX, kv.k, values_of(kv), x.positions, x.slots, shape.num_heads, cos_sin, q_norm, k_norm, eps, keys
        )  # fmt: skip
        if keys is None:
            return paged_attention(q, kv, x, scale, window).flatten(1)
        values = split_heads(qkv_TX, shape)[2]
        return attend_fa3_packed(q, keys, values, x.cu_seqlens_q, x.max_query, scale, window).flatten(1)

    return evolve(ops, attend=attend)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.rms_norm, of a weight of x's dtype."""
    x = x.contiguous()
    out = torch.empty_like(x)
    operator("_C", "rms_norm")(result=out, input=x, weight=weight, epsilon=eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """norm.fused_add_rms_norm *in place*: x becomes the norm, residual the sum, and these two are returned. Both must
    be contiguous, and the caller's own.
    """
    operator("_C", "fused_add_rms_norm")(input=x, residual=residual, weight=weight, epsilon=eps)
    return x, residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """norm.silu_and_mul."""
    out = torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    operator("_C", "silu_and_mul")(result=out, input=gate_up)
    return out


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """rope.rotary_embedding, with the table in float32 as it is. The operator works in place, so on copies."""
    q, k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    _rotate(positions, q, k, cos_sin, interleaved=interleaved)
    return q, k


def _rotate(positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, *, interleaved: bool) -> None:
    operator("_C", "rotary_embedding")(
        positions=positions, query=q.flatten(1), key=k.flatten(1), head_size=q.shape[-1], cos_sin_cache=cos_sin,
        is_neox=not interleaved,
    )  # fmt: skip


def write_kv(k_THD: Tensor, v_THD: Tensor, kv: LayerKv, slots_T: Tensor) -> None:
    """attention.write_kv."""
    unread = torch.empty(1, dtype=torch.float32, device=k_THD.device)  # scales are for caches of 8 bits
    operator("_C_cache_ops", "reshape_and_cache_flash")(
        key=k_THD, value=v_THD, key_cache=kv.k, value_cache=values_of(kv), slot_mapping=slots_T, kv_cache_dtype="auto",
        k_scale=unread, v_scale=unread,
    )  # fmt: skip


def _attend(
    qkv_TX: Tensor, kv: LayerKv, x: Inputs, shape: HeadShape, cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Ops.attend by five kernels."""
    q, k, v = split_heads(qkv_TX, shape)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    elif q_norm is not None or k_norm is not None:
        raise ValueError("queries and keys are normed both or neither; one norm weight is missing")
    else:
        q, k = q.contiguous(), k.contiguous()
    _rotate(x.positions, q, k, cos_sin, interleaved=False)
    write_kv(k, v, kv, x.slots)
    return paged_attention(q, kv, x, scale, window).flatten(1)


def vllm_ops() -> Ops:
    """Ops of vLLM's kernels; products are torch's. Raises InvalidSetting if vllm does not bring them all."""
    load_all()
    primitives = Primitives(
        rms_norm=rms_norm,
        fused_add_rms_norm=fused_add_rms_norm,
        silu_and_mul=silu_and_mul,
        rotary_embedding=rotary_embedding,
        write_kv=write_kv,
        paged_attention=paged_attention,
        linear=linear.linear,
    )
    return composed("vllm", primitives, _attend)
