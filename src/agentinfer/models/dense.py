"""Qwen2, Qwen3 and Llama: one dense decoder, as data and three functions.

Shapes: T positions, S samples, V vocabulary, D model width, N query heads, K KV heads, H head dim, X = (N + 2K) H
local qkv width, F local feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.models import decoder
from agentinfer.models.config import DenseConfig, check_tp
from agentinfer.models.decoder import Ready, Weights
from agentinfer.models.weights import Spec
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Group, Ranks
from agentinfer.ops.compiled import Layer
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import Donated, KvCache, KvLayout, LayerKv, gqa
from agentinfer.ops.provide import Ops, Stream
from agentinfer.ops.rope import cos_sin
from agentinfer.ops.scaled import Scaled

A = TypeVar("A")
B = TypeVar("B")


@frozen(eq=False)
class DenseLayer(Generic[A]):
    """The weights of one layer, as the checkpoint has them."""

    attn_norm: A
    q: A
    k: A
    v: A
    q_bias: A | None
    k_bias: A | None
    v_bias: A | None
    q_norm: A | None
    k_norm: A | None
    o: A
    o_bias: A | None
    ffn_norm: A
    gate: A
    up: A
    gate_bias: A | None
    up_bias: A | None
    down: A
    down_bias: A | None


@frozen(eq=False)
class PackedLayer(Generic[A]):
    """The weights of one layer, as forward reads them."""

    attn_norm: A
    qkv: A | Scaled[A]
    qkv_bias: A | None
    q_norm: A | None
    k_norm: A | None
    o: A | Scaled[A]
    o_bias: A | None
    ffn_norm: A
    gate_up: A | Scaled[A]
    gate_up_bias: A | None
    down: A | Scaled[A]
    down_bias: A | None


Dense = Ready[PackedLayer[Tensor]]
"""What forward reads."""


def specs(c: DenseConfig) -> Weights[DenseLayer[Spec], Spec]:
    """Every weight of the model, once: name, shape, cut."""
    d, f, h = c.hidden_size, c.intermediate_size, c.head_dim
    q_rows, kv_rows = c.num_heads * h, c.num_kv_heads * h

    def bias_of(weight: Spec, there: bool) -> Spec | None:
        """Cut as the rows of *weight* are; whole, to be added once, where its columns are cut."""
        name, cut = weight.name.removesuffix("weight") + "bias", 0 if weight.cut == 0 else None
        return (
            evolve(weight, name=name, shape=weight.shape[:1], cut=cut, kind="bias", quantizable=False)
            if there
            else None
        )

    def layer(i: int) -> DenseLayer[Spec]:
        p = f"model.layers.{i}."
        q = Spec(p + "self_attn.q_proj.weight", (q_rows, d), 0, h, quantizable=True)
        k = Spec(p + "self_attn.k_proj.weight", (kv_rows, d), 0, h, share=True, quantizable=True)
        v = Spec(p + "self_attn.v_proj.weight", (kv_rows, d), 0, h, share=True, quantizable=True)
        o = Spec(p + "self_attn.o_proj.weight", (d, q_rows), 1, h, quantizable=True)
        gate = Spec(p + "mlp.gate_proj.weight", (f, d), 0, pad=True, quantizable=True)
        up = Spec(p + "mlp.up_proj.weight", (f, d), 0, pad=True, quantizable=True)
        down = Spec(p + "mlp.down_proj.weight", (d, f), 1, pad=True, quantizable=True)
        return DenseLayer(
            attn_norm=Spec(p + "input_layernorm.weight", (d,), kind="norm"),
            q=q,
            k=k,
            v=v,
            q_bias=bias_of(q, c.qkv_bias),
            k_bias=bias_of(k, c.qkv_bias),
            v_bias=bias_of(v, c.qkv_bias),
            q_norm=Spec(p + "self_attn.q_norm.weight", (h,), kind="norm") if c.qk_norm else None,
            k_norm=Spec(p + "self_attn.k_norm.weight", (h,), kind="norm") if c.qk_norm else None,
            o=o,
            o_bias=bias_of(o, c.o_bias),
            ffn_norm=Spec(p + "post_attention_layernorm.weight", (d,), kind="norm"),
            gate=gate,
            up=up,
            gate_bias=bias_of(gate, c.mlp_bias),
            up_bias=bias_of(up, c.mlp_bias),
            down=down,
            down_bias=bias_of(down, c.mlp_bias),
        )

    return decoder.around((layer(i) for i in range(c.num_layers)), c.vocab_size, d, tied=c.tied)


def pack(w: Weights[DenseLayer[A], A], join: Callable[[tuple[A, ...]], B]) -> Weights[PackedLayer[B], B]:
    """Merge what one matrix product computes: rows of q, k, v; rows of gate, up. *join* puts rows under each other."""
    optional = partial(decoder.optional, join)

    def layer(x: DenseLayer[A]) -> PackedLayer[B]:
        return PackedLayer(
            attn_norm=join((x.attn_norm,)),
            qkv=join((x.q, x.k, x.v)),
            qkv_bias=optional(x.q_bias, x.k_bias, x.v_bias),
            q_norm=optional(x.q_norm),
            k_norm=optional(x.k_norm),
            o=join((x.o,)),
            o_bias=optional(x.o_bias),
            ffn_norm=join((x.ffn_norm,)),
            gate_up=join((x.gate, x.up)),
            gate_up_bias=optional(x.gate_bias, x.up_bias),
            down=join((x.down,)),
            down_bias=optional(x.down_bias),
        )

    return decoder.pack(w, join, layer)


def ready(c: DenseConfig, w: Weights[PackedLayer[Tensor], Tensor], max_positions: int) -> Dense:
    """What forward reads, for sequences of up to *max_positions* tokens."""
    return decoder.ready(w, cos_sin(c.rope, max_positions, w.embed.device))


@frozen(eq=False)
class Shared:
    """What all layers of a forward pass have in common."""

    ops: Ops
    tp: Group
    heads: HeadShape
    eps: float
    scale: float
    cos_sin: Tensor
    """[max_positions, H] float32."""


def layer(s: Shared, w: PackedLayer[Tensor], window: int | None, kv: LayerKv, x: Inputs, stream: Stream) -> Stream:
    """One layer of the model. Writes the keys and values of this step to *kv*.

    **Source**: the Qwen2, Qwen3 and Llama modeling files of transformers 5.
    """
    ops, tp, eps = s.ops, s.tp, s.eps
    qkv_TX, stream = ops.norm_qkv(stream, w.attn_norm, w.qkv, w.qkv_bias, eps)
    attn_TX = ops.attend(qkv_TX, kv, x, s.heads, s.cos_sin, w.q_norm, w.k_norm, eps, s.scale, window)
    stream = ops.out_add(attn_TX, w.o, w.o_bias, stream, tp)
    act_TF, stream = ops.norm_gate_up(stream, w.ffn_norm, w.gate_up, w.gate_up_bias, eps)
    return ops.down_add(act_TF, w.down, w.down_bias, stream, tp)


def forward(
    c: DenseConfig, w: Dense, ops: Ops, ranks: Ranks, kv: Donated[KvCache], x: Inputs, run: Layer = layer
) -> tuple[Tensor, KvCache]:
    """Logits of the wanted positions, [S, V] float32, and the KV cache with this step's keys and values. *Donates* kv.

    *run*: `layer`, or what was made of it.
    """
    tp, heads = ranks.tp, local_heads(c, ranks.tp.size)
    if ops.row_step is not None and len(x.ids) == len(x.samples) == 1:
        kv = kv.consume("forward")
        return ops.row_step(w, heads, c.windows, c.norm_eps, c.scale, tp, kv.layers, x), kv
    shared = Shared(ops, tp, heads, c.norm_eps, c.scale, w.cos_sin)
    return decoder.forward(w, ops, ranks, kv, x, run, shared, c.windows, c.norm_eps, c.vocab_size)


def local_heads(c: DenseConfig, tp: int) -> HeadShape:
    """The heads of one of *tp* ranks: at least one KV head each."""
    return HeadShape(c.num_heads // tp, max(1, c.num_kv_heads // tp), c.head_dim)


def kv_layouts(c: DenseConfig, tp: int, block_size: int, dtype: torch.dtype) -> tuple[KvLayout, ...]:
    """What each layer keeps of a token on one of *tp* ranks. Raises InvalidSetting if they can not share the heads."""
    check_tp(c, tp)
    return (gqa(block_size, local_heads(c, tp).num_kv_heads, c.head_dim, dtype),) * c.num_layers


def rename(c: DenseConfig, key: str) -> str | None:
    """The model's name for a checkpoint's *key*; None: known, and of no use here.

    Of vision-language checkpoints only the language part is read. A head beside a tied embedding is not used: the
    embedding is the head.
    """
    if key.endswith("rotary_emb.inv_freq") or (c.tied and key == "lm_head.weight"):
        return None
    if "VL" in c.architecture:
        if key.startswith(("visual.", "model.visual.")):
            return None
        for prefix in ("model.language_model.", "language_model.model."):
            if key.startswith(prefix):
                return "model." + key.removeprefix(prefix)
        return key.removeprefix("language_model.") if key == "language_model.lm_head.weight" else key
    return key
