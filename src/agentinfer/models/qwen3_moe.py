"""Qwen3-MoE: the attention of Qwen3, and experts, as data and three functions.

Shapes: T positions, S samples, V vocabulary, D model width, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.models import config, decoder, dense, mlp
from agentinfer.models.config import CONFIG, DenseConfig, read_dense
from agentinfer.models.decoder import Ready, Weights
from agentinfer.models.expert_config import ExpertConfig, qwen3_experts
from agentinfer.models.fields import Fields
from agentinfer.models.mlp import Experts, Mlp, PackedExperts, PackedMlp
from agentinfer.models.weights import Spec
from agentinfer.ops.comm import Ranks
from agentinfer.ops.compiled import Layer
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import Donated, KvCache, KvLayout, LayerKv
from agentinfer.ops.moe import Routing
from agentinfer.ops.provide import LayerShape, Ops, Stream
from agentinfer.ops.rope import cos_sin
from agentinfer.ops.scaled import Scaled

A = TypeVar("A")
B = TypeVar("B")


@frozen
class Qwen3MoeConfig:
    """A dense decoder, some or all of whose layers have experts instead of an MLP."""

    dense: DenseConfig
    experts: ExpertConfig

    @property
    def architecture(self) -> str:
        """`architectures[0]`."""
        return self.dense.architecture

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.dense.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        return self.dense.num_layers

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""
        return self.dense.max_positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence."""
        return self.dense.eos_ids

    @property
    def tied(self) -> bool:
        """The embedding is the LM head."""
        return self.dense.tied


def read_qwen3_moe(raw: Mapping[str, Any], folder: Path) -> Qwen3MoeConfig:
    """The config of Qwen3-MoE from the JSON object *raw* of *folder*'s config.json.

    Raises CheckpointError naming file and field.
    """
    base, f = read_dense(raw, folder), Fields(raw, str(folder / CONFIG))
    if base.mlp_bias:
        raise f.fault("mlp_bias", "true; biases of experts are not supported")
    return Qwen3MoeConfig(base, qwen3_experts(f, base.num_layers))


def check_tp(c: Qwen3MoeConfig, tp: int) -> None:
    """Whether *tp* ranks can share the heads. Raises InvalidSetting naming the tp that can."""
    config.check_tp(c.dense, tp)


@frozen(eq=False)
class MoeLayer(Generic[A]):
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
    ffn: Mlp[A] | Experts[A]


@frozen(eq=False)
class PackedMoeLayer(Generic[A]):
    """The weights of one layer, as forward reads them."""

    attn_norm: A
    qkv: A | Scaled[A]
    qkv_bias: A | None
    q_norm: A | None
    k_norm: A | None
    o: A | Scaled[A]
    o_bias: A | None
    ffn_norm: A
    ffn: PackedMlp[A] | PackedExperts[A]


Moe = Ready[PackedMoeLayer[Tensor]]
"""What forward reads."""


def specs(c: Qwen3MoeConfig) -> Weights[MoeLayer[Spec], Spec]:
    """Every weight of the model, once: name, shape, cut. All but experts are as in the dense decoder."""
    base = dense.specs(c.dense)

    def layer(i: int, x: dense.DenseLayer[Spec]) -> MoeLayer[Spec]:
        experts = mlp.expert_specs(c.experts, f"model.layers.{i}.mlp.", c.dense.hidden_size)
        return MoeLayer(
            attn_norm=x.attn_norm,
            q=x.q,
            k=x.k,
            v=x.v,
            q_bias=x.q_bias,
            k_bias=x.k_bias,
            v_bias=x.v_bias,
            q_norm=x.q_norm,
            k_norm=x.k_norm,
            o=x.o,
            o_bias=x.o_bias,
            ffn_norm=x.ffn_norm,
            ffn=experts if c.experts.layers[i] else Mlp(x.gate, x.up, x.down),
        )

    return Weights(base.embed, tuple(layer(i, x) for i, x in enumerate(base.layers)), base.norm, base.head)


def pack(w: Weights[MoeLayer[A], A], join: Callable[[tuple[A, ...]], B]) -> Weights[PackedMoeLayer[B], B]:
    """Merge what one matrix product computes: rows of q, k, v; of gate, up; of all experts."""
    optional = partial(decoder.optional, join)

    def layer(x: MoeLayer[A]) -> PackedMoeLayer[B]:
        return PackedMoeLayer(
            attn_norm=join((x.attn_norm,)),
            qkv=join((x.q, x.k, x.v)),
            qkv_bias=optional(x.q_bias, x.k_bias, x.v_bias),
            q_norm=optional(x.q_norm),
            k_norm=optional(x.k_norm),
            o=join((x.o,)),
            o_bias=optional(x.o_bias),
            ffn_norm=join((x.ffn_norm,)),
            ffn=mlp.pack_ffn(x.ffn, join),
        )

    return decoder.pack(w, join, layer)


def ready(c: Qwen3MoeConfig, w: Weights[PackedMoeLayer[Tensor], Tensor], max_positions: int) -> Moe:
    """What forward reads, for sequences of up to *max_positions* tokens."""

    def layer(x: PackedMoeLayer[Tensor]) -> PackedMoeLayer[Tensor]:
        return evolve(x, ffn=mlp.stacked(x.ffn))

    return decoder.ready(w, cos_sin(c.dense.rope, max_positions, w.embed.device), layer)


@frozen(eq=False)
class Shared:
    """What all layers of a forward pass have in common."""

    dense: dense.Shared
    routing: Routing


def layer(s: Shared, w: PackedMoeLayer[Tensor], window: int | None, kv: LayerKv, x: Inputs, stream: Stream) -> Stream:
    """One layer of the model. Writes the keys and values of this step to *kv*.

    **Source**: the Qwen3-MoE modeling file of transformers 5.
    """
    d = s.dense
    qkv_TX, stream = d.ops.norm_qkv(stream, w.attn_norm, w.qkv, w.qkv_bias, d.eps)
    attn_TX = d.ops.attend(qkv_TX, kv, x, d.heads, d.cos_sin, w.q_norm, w.k_norm, d.eps, d.scale, window)
    stream = d.ops.out_add(attn_TX, w.o, w.o_bias, stream, d.tp)
    return mlp.feed_forward(d.ops, d.tp, s.routing, d.eps, w.ffn_norm, w.ffn, stream)


def forward(
    c: Qwen3MoeConfig,
    w: Ready[PackedMoeLayer[Tensor]],
    ops: Ops,
    ranks: Ranks,
    kv: Donated[KvCache],
    x: Inputs,
    run: Layer = layer,
) -> tuple[Tensor, KvCache]:
    """Logits of the wanted positions, [S, V] float32, and the KV cache with this step's keys and values. *Donates* kv.

    *run*: `layer`, or what was made of it.
    """
    tp, d = ranks.tp, c.dense
    attention = dense.Shared(ops, tp, dense.local_heads(d, tp.size), d.norm_eps, d.scale, w.cos_sin)
    shared = Shared(attention, mlp.local_routing(c.experts, ranks))
    return decoder.forward(w, ops, ranks, kv, x, run, shared, d.windows, d.norm_eps, d.vocab_size)


def layer_shape(c: Qwen3MoeConfig, tp: int) -> LayerShape:
    """What the layers of one of *tp* ranks are made of."""
    return LayerShape(dense.local_heads(c.dense, tp), None, mlp.expert_shape(c.experts, tp))


def kv_layouts(c: Qwen3MoeConfig, tp: int, block_size: int, dtype: torch.dtype) -> tuple[KvLayout, ...]:
    """What each layer keeps of a token on one of *tp* ranks. Raises InvalidSetting if they can not share the heads."""
    return dense.kv_layouts(c.dense, tp, block_size, dtype)


def rename(c: Qwen3MoeConfig, key: str) -> str | None:
    """The model's name for a checkpoint's *key*; None: known, and of no use here."""
    return dense.rename(c.dense, key)
