"""DeepSeek-V2 and V3: latent attention and experts, as data and three functions.

Shapes: T positions, S samples, V vocabulary, D model width, N local query heads, U / P numbers of a query or key head
that are not / are rotated, L latent width, C = L + P what is cached of a token, O value width of a head, Q width of a
query's latent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.models import decoder, mlp
from agentinfer.models.decoder import Ready, Weights
from agentinfer.models.deepseek_config import DeepseekConfig, check_tp
from agentinfer.models.mlp import Experts, Mlp, PackedExperts, PackedMlp
from agentinfer.models.weights import Spec
from agentinfer.ops import kv as kvs
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Group, Ranks
from agentinfer.ops.compiled import Layer
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import Donated, KvCache, KvLayout, LayerKv
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import Routing
from agentinfer.ops.provide import LayerShape, Ops, Stream
from agentinfer.ops.rope import cos_sin
from agentinfer.ops.scaled import Scaled

_log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says. **Source**: both modeling files leave it at its default."""


@frozen(eq=False)
class LatentLayer(Generic[A]):
    """The weights of one layer, as the checkpoint has them."""

    attn_norm: A
    q: A | None
    """Where queries have no latent; else the next three."""
    q_down: A | None
    q_norm: A | None
    q_up: A | None
    kv_down: A
    """Rows: latent, rope key."""
    kv_norm: A
    kv_up: A
    """Rows of a head: key without rope, value."""
    o: A
    ffn_norm: A
    ffn: Mlp[A] | Experts[A]


@frozen(eq=False)
class PackedLatentLayer(Generic[A]):
    """The weights of one layer, as forward reads them."""

    attn_norm: A
    down: A | Scaled[A]
    """Rows: the query or its latent, then the latent and the rope key of keys and values."""
    q_norm: A | None
    q_up: A | Scaled[A] | None
    kv_norm: A
    kv_b: A
    """[N * (U + O), L] as packed, [N, U + O, L] in Deepseek. Never in 8 bits: it goes into queries and outputs."""
    o: A | Scaled[A]
    ffn_norm: A
    ffn: PackedMlp[A] | PackedExperts[A]


Deepseek = Ready[PackedLatentLayer[Tensor]]
"""What forward reads."""


def specs(c: DeepseekConfig) -> Weights[LatentLayer[Spec], Spec]:
    """Every weight of the model, once: name, shape, cut."""
    d, q_head, kv_head = c.hidden_size, c.nope_dim + c.rope_dim, c.nope_dim + c.value_dim
    q_rows = c.num_heads * q_head

    def layer(i: int) -> LatentLayer[Spec]:
        p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        rank = c.q_lora_rank
        ffn = p + "mlp."
        return LatentLayer(
            attn_norm=Spec(p + "input_layernorm.weight", (d,), kind="norm"),
            q=Spec(a + "q_proj.weight", (q_rows, d), 0, q_head, quantizable=True) if rank is None else None,
            q_down=None if rank is None else Spec(a + "q_a_proj.weight", (rank, d), quantizable=True),
            q_norm=None if rank is None else Spec(a + "q_a_layernorm.weight", (rank,), kind="norm"),
            q_up=None if rank is None else Spec(a + "q_b_proj.weight", (q_rows, rank), 0, q_head, quantizable=True),
            kv_down=Spec(a + "kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.rope_dim, d), quantizable=True),
            kv_norm=Spec(a + "kv_a_layernorm.weight", (c.kv_lora_rank,), kind="norm"),
            kv_up=Spec(a + "kv_b_proj.weight", (c.num_heads * kv_head, c.kv_lora_rank), 0, kv_head),
            o=Spec(a + "o_proj.weight", (d, c.num_heads * c.value_dim), 1, c.value_dim, quantizable=True),
            ffn_norm=Spec(p + "post_attention_layernorm.weight", (d,), kind="norm"),
            ffn=(
                mlp.expert_specs(c.experts, ffn, d)
                if c.experts.layers[i]
                else mlp.mlp_specs(ffn, d, c.intermediate_size)
            ),
        )

    return decoder.around((layer(i) for i in range(c.num_layers)), c.vocab_size, d, tied=c.tied)


def pack(w: Weights[LatentLayer[A], A], join: Callable[[tuple[A, ...]], B]) -> Weights[PackedLatentLayer[B], B]:
    """Merge what one matrix product computes: rows of q and kv; of gate, up; of all experts."""
    optional = partial(decoder.optional, join)

    def layer(x: LatentLayer[A]) -> PackedLatentLayer[B]:
        return PackedLatentLayer(
            attn_norm=join((x.attn_norm,)),
            down=join(tuple(part for part in (x.q, x.q_down, x.kv_down) if part is not None)),
            q_norm=optional(x.q_norm),
            q_up=optional(x.q_up),
            kv_norm=join((x.kv_norm,)),
            kv_b=join((x.kv_up,)),
            o=join((x.o,)),
            ffn_norm=join((x.ffn_norm,)),
            ffn=mlp.pack_ffn(x.ffn, join),
        )

    return decoder.pack(w, join, layer)


def ready(c: DeepseekConfig, w: Weights[PackedLatentLayer[Tensor], Tensor], max_positions: int) -> Deepseek:
    """What forward reads, for sequences of up to *max_positions* tokens. Says that layers are left out, if any are."""
    if c.mtp_layers:
        _log.info("%s: %d layers of multi-token prediction are not used", c.architecture, c.mtp_layers)

    def layer(x: PackedLatentLayer[Tensor]) -> PackedLatentLayer[Tensor]:
        kv_b = x.kv_b.view(-1, c.nope_dim + c.value_dim, c.kv_lora_rank)
        return evolve(x, kv_b=kv_b, ffn=mlp.stacked(x.ffn))

    return decoder.ready(w, cos_sin(c.rope, max_positions, w.embed.device), layer)


@frozen(eq=False)
class Shared:
    """What all layers of a forward pass have in common."""

    ops: Ops
    tp: Group
    shape: LatentShape
    routing: Routing
    eps: float
    scale: float
    cos_sin: Tensor
    """[max_positions, P] float32."""


def layer(
    s: Shared, w: PackedLatentLayer[Tensor], window: int | None, kv: LayerKv, x: Inputs, stream: Stream
) -> Stream:
    """One layer of the model. Writes the latents and rope keys of this step to *kv*. No layer has a *window*.

    **Source**: DeepSeek-V2 report, 2.1 and appendix C; the DeepSeek-V2 and V3 modeling files.
    """
    del window
    ops = s.ops
    q_TX, latent_TC, stream = ops.norm_latent(
        stream, w.attn_norm, w.down, w.q_norm, w.q_up, s.shape, s.eps, LATENT_EPS
    )  # fmt: skip
    attn_TX = ops.attend_latent(q_TX, latent_TC, kv, x, s.shape, s.cos_sin, w.kv_norm, w.kv_b, s.scale, LATENT_EPS)
    stream = ops.out_add(attn_TX, w.o, None, stream, s.tp)
    return mlp.feed_forward(ops, s.tp, s.routing, s.eps, w.ffn_norm, w.ffn, stream)


def forward(
    c: DeepseekConfig, w: Deepseek, ops: Ops, ranks: Ranks, kv: Donated[KvCache], x: Inputs, run: Layer = layer
) -> tuple[Tensor, KvCache]:
    """Logits of the wanted positions, [S, V] float32, and the KV cache with this step's latents. *Donates* kv.

    *run*: `layer`, or what was made of it.
    """
    tp, routing = ranks.tp, mlp.local_routing(c.experts, ranks)
    shared = Shared(ops, tp, local_shape(c, tp.size), routing, c.norm_eps, c.scale, w.cos_sin)
    windows = (None,) * c.num_layers
    return decoder.forward(w, ops, ranks, kv, x, run, shared, windows, c.norm_eps, c.vocab_size)


def local_shape(c: DeepseekConfig, tp: int) -> LatentShape:
    """The heads of one of *tp* ranks."""
    return LatentShape(c.num_heads // tp, c.nope_dim, c.rope_dim, c.kv_lora_rank, c.value_dim, c.interleaved)


def layer_shape(c: DeepseekConfig, tp: int) -> LayerShape:
    """What the layers of one of *tp* ranks are made of."""
    latent = local_shape(c, tp)
    heads = HeadShape(latent.num_heads, 1, latent.cached_dim)
    return LayerShape(heads, latent, mlp.expert_shape(c.experts, tp))


def kv_layouts(c: DeepseekConfig, tp: int, block_size: int, dtype: torch.dtype) -> tuple[KvLayout, ...]:
    """What each layer keeps of a token on one of *tp* ranks. Raises InvalidSetting if they can not share the heads."""
    check_tp(c, tp)
    return (kvs.mla(block_size, c.kv_lora_rank, c.rope_dim, dtype),) * c.num_layers


def rename(c: DeepseekConfig, key: str) -> str | None:
    """The model's name for a checkpoint's *key*; None: known, and of no use here.

    That are layers of multi-token prediction, which follow the others, and a head beside a tied embedding.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    if layer is not None and c.num_layers <= int(layer[1]) < c.num_layers + c.mtp_layers:
        return None
    if key.endswith("rotary_emb.inv_freq") or (c.tied and key == "lm_head.weight"):
        return None
    return key
