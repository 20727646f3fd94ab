"""Model: an architecture as data and functions, found by `architectures[0]` of config.json, and loading one whole.

Knows which architectures there are. Must not know how any of them computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models import deepseek, dense, qwen3_moe
from agentinfer.models.checkpoint import Checkpoint, open_checkpoint
from agentinfer.models.config import CONFIG, DTYPES, architecture_of, check_tp, eos_ids, read_dense
from agentinfer.models.deepseek_config import check_tp as check_latent_tp
from agentinfer.models.deepseek_config import read_deepseek
from agentinfer.models.eight_bits import in_8_bits, quantized_tensors
from agentinfer.models.expert_config import ExpertConfig
from agentinfer.models.folder import read_json
from agentinfer.models.fp8 import DEQUANTIZE, FP8, NATIVE, SCALES, is_quantized
from agentinfer.models.mlp import check_spread
from agentinfer.models.weights import (
    STORED_DTYPES,
    Fused,
    dummy_tensors,
    load,
    load_tensors,
    match,
    num_parameters,
    packed_bytes,
    random_tensors,
    spread_experts,
    tree_leaves,
)
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Ranks
from agentinfer.ops.compiled import Layer
from agentinfer.ops.kv import KvCache, KvLayout
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.provide import LayerShape

__all__ = [
    "ARCHITECTURES", "Config", "Model", "WeightSizes", "dummy_model", "eos_ids", "held", "kv_layout", "load_model",
    "random_model", "read_config", "weight_sizes",
]  # fmt: skip

_log = logging.getLogger(__name__)


class Config(Protocol):
    """What every model's config says."""

    @property
    def architecture(self) -> str:
        """`architectures[0]`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence."""
        ...

    @property
    def tied(self) -> bool:
        """The embedding is the LM head."""
        ...


Forward = Callable[..., tuple[Tensor, KvCache]]
"""(config, weights, ops, ranks, kv, inputs, run=layer) -> ([S, V] float32 logits, kv). *Donates* kv."""


@frozen(eq=False)
class Model:
    """An architecture with its config. The functions take the config, so that one serves many models."""

    config: Config
    dtype: torch.dtype | None
    """What the weights are held in; None: neither config.json nor the caller said, the file will."""
    specs: Callable[[Any], Any]
    """(config) -> a tree of Spec."""
    pack: Callable[[Any, Callable[[tuple[Any, ...]], Any]], Any]
    """(tree, join) -> the tree with weights merged as forward reads them."""
    ready: Callable[[Any, Any, int], Any]
    """(config, packed tree of Tensor, max positions) -> what forward takes as weights."""
    forward: Forward
    layer: Layer
    """What forward runs each layer by, unless told otherwise."""
    kv_layouts: Callable[[Any, int, int, torch.dtype], tuple[KvLayout, ...]]
    """(config, tp, block size, dtype) -> one a layer."""
    heads: Callable[[Any, int], HeadShape | LayerShape]
    """(config, tp) -> the attention heads of a rank; with what its layers have besides."""
    rename: Callable[[Any, str], str | None]
    """(config, key of a checkpoint) -> name of a Spec, None where it is knowingly not used."""
    check_tp: Callable[[Any, int], None]
    """(config, tp). Raises InvalidSetting."""
    experts: ExpertConfig | None = None
    """Of the layers that have some."""
    quantized: bool = False
    """The checkpoint's matrices are in 8 bits."""
    fp8: str = DEQUANTIZE
    """How those are held: one of FP8."""

    def forward_through(self, wrap: Callable[[Layer], Layer]) -> Forward:
        """`forward`, whose layers are run by what *wrap* makes of `layer`, once."""
        return partial(self.forward, run=wrap(self.layer))

    @property
    def name(self) -> str:
        """`architectures[0]` of its config."""
        return self.config.architecture

    @property
    def packed(self) -> Any:
        """A tree of Fused: every tensor that a rank holds, before it exists; experts are cut by width."""
        return self.pack(self.specs(self.config), Fused)

    def packed_on(self, ranks: int, *, ep: bool) -> Any:
        """`packed`, where *ep* says so with the experts spread, and in 8 bits if `fp8` says that.

        Raises InvalidSetting if *ranks* can not share it.
        """
        self.check_tp(self.config, ranks)
        packed = self.packed
        if ep:
            check_spread(self.experts, self.name, ranks)
            packed = spread_experts(packed)
        return in_8_bits(packed, ranks) if self.fp8 == NATIVE else packed

    def shape_on(self, ranks: int, *, ep: bool) -> HeadShape | LayerShape:
        """What the layers of one of *ranks* are made of."""
        shape = self.heads(self.config, ranks)
        if not ep or self.experts is None or isinstance(shape, HeadShape):
            return shape
        held = ExpertShape(self.experts.num_experts // ranks, self.experts.routing.top_k, self.experts.width)
        return evolve(shape, experts=held)


@frozen
class WeightSizes:
    """What the weights of a model take, read from its Spec tree alone."""

    num_parameters: int
    """Of the whole model; a tied head is counted once."""
    rank_bytes: int
    """On each rank."""
    largest_bytes: int
    """The largest fused group on a rank: what loading may need on top."""


def _dense(raw: Mapping[str, Any], folder: Path) -> Model:
    config = read_dense(raw, folder)
    return Model(
        config=config,
        dtype=config.dtype,
        specs=dense.specs,
        pack=dense.pack,
        ready=dense.ready,
        forward=dense.forward,
        layer=dense.layer,
        kv_layouts=dense.kv_layouts,
        heads=dense.local_heads,
        rename=dense.rename,
        check_tp=check_tp,
    )


def _deepseek(raw: Mapping[str, Any], folder: Path) -> Model:
    config = read_deepseek(raw, folder)
    return Model(
        config=config,
        dtype=config.dtype,
        specs=deepseek.specs,
        pack=deepseek.pack,
        ready=deepseek.ready,
        forward=deepseek.forward,
        layer=deepseek.layer,
        kv_layouts=deepseek.kv_layouts,
        heads=deepseek.layer_shape,
        rename=deepseek.rename,
        check_tp=check_latent_tp,
        experts=config.experts,
    )


def _qwen3_moe(raw: Mapping[str, Any], folder: Path) -> Model:
    config = qwen3_moe.read_qwen3_moe(raw, folder)
    return Model(
        config=config,
        dtype=config.dense.dtype,
        specs=qwen3_moe.specs,
        pack=qwen3_moe.pack,
        ready=qwen3_moe.ready,
        forward=qwen3_moe.forward,
        layer=qwen3_moe.layer,
        kv_layouts=qwen3_moe.kv_layouts,
        heads=qwen3_moe.layer_shape,
        rename=qwen3_moe.rename,
        check_tp=qwen3_moe.check_tp,
        experts=config.experts,
    )


ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any], Path], Model]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _deepseek,
        "DeepseekV3ForCausalLM": _deepseek,
        "LlamaForCausalLM": _dense,
        "Qwen2ForCausalLM": _dense,
        "Qwen3ForCausalLM": _dense,
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "Qwen2VLForCausalLM": _dense,
        "Qwen2VLForConditionalGeneration": _dense,
        "Qwen2_5_VLForCausalLM": _dense,
        "Qwen2_5_VLForConditionalGeneration": _dense,
    }
)
"""architectures[0] -> what reads its config.json. Of the VL ones the language part, for text."""


def read_config(folder: Path) -> Model:
    """The model in *folder*, from its config.json alone. Raises CheckpointError naming file and field."""
    raw = read_json(folder, CONFIG)
    name = architecture_of(raw, str(folder / CONFIG))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{folder / CONFIG}: architectures: {name} is not supported; supported are {known}")
    return evolve(ARCHITECTURES[name](raw, folder), quantized=is_quantized(raw))


def held(model: Model, fp8: str) -> Model:
    """*model*, whose matrices in 8 bits are held as *fp8* says. Raises InvalidSetting if it has none to be held so."""
    if fp8 not in FP8:
        raise InvalidSetting("fp8", f"{fp8!r} is none of {', '.join(FP8)}")
    if fp8 == NATIVE and not model.quantized:
        why = "config.json has no quantization_config: the checkpoint's weights are not in 8 bits"
        raise InvalidSetting("fp8", f"native: {model.name}: {why}")
    return evolve(model, fp8=fp8)


def load_model(
    folder: Path, dtype: torch.dtype | None, ranks: Ranks, max_positions: int | None = None, fp8: str = DEQUANTIZE
) -> tuple[Model, Any]:
    """The model in *folder*, and this rank's packed weights, which its forward takes.

    *dtype*: None means config.json's, else that of the stored weights; the Model returned says which it became.
    *max_positions*: tokens of the longest sequence, None: all that the model is made for. *fp8*: see `held`.
    Raises CheckpointError naming file and key or field, InvalidSetting for ranks that can not share the model.
    """
    model = held(read_config(folder), fp8)
    packed = model.packed_on(ranks.tp.size, ep=ranks.ep)
    checkpoint = open_checkpoint(folder)
    found = match(checkpoint, model.packed, partial(model.rename, model.config))
    if model.config.tied and "lm_head.weight" in checkpoint.tensors:
        _log.warning("%s: lm_head.weight is not used: tie_word_embeddings is true, the embedding is the head", folder)
    model = evolve(model, dtype=_chosen(model, dtype, checkpoint))
    weights = load(packed, found, ranks.tp, ranks.device, _known(model))
    return model, _ready(model, weights, max_positions)


def random_model(model: Model, dtype: torch.dtype, ranks: Ranks, seed: int = 0) -> tuple[Model, Any]:
    """*model* with weights drawn at random, as `load_model` gives it: for tests and benchmarks without a checkpoint."""
    packed = model.packed_on(ranks.tp.size, ep=ranks.ep)
    model = evolve(model, dtype=_chosen(model, dtype, None))
    tensors = quantized_tensors(packed, random_tensors(model.specs(model.config), seed=seed))
    return model, _ready(model, load_tensors(packed, tensors, ranks.tp, ranks.device, dtype), None)


def model_of_tensors(
    model: Model, tensors: Mapping[str, Tensor], ranks: Ranks, max_positions: int | None = None
) -> Any:
    """This rank's packed weights of *model* (whose dtype is known), from the whole *tensors* of a checkpoint by their
    keys. Those of no use are ignored, as in a checkpoint. A model that is held in 8 bits rounds them to those.

    Raises CheckpointError listing what is missing, unexpected or of another shape, and for numbers that are not finite.
    """
    wanted = {spec.name: spec for leaf in tree_leaves(model.packed) for spec in leaf.parts}
    named = {name: x for key, x in tensors.items() if (name := model.rename(model.config, key)) is not None}
    faults = [f"missing: {name}" for name in wanted if name not in named]
    faults += [f"unexpected: {name}" for name in named if name not in wanted]
    faults += [
        f"{name} has shape {tuple(x.shape)}, the model wants {wanted[name].shape}"
        for name, x in named.items()
        if name in wanted and tuple(x.shape) != wanted[name].shape
    ]
    if faults:
        raise CheckpointError(f"the tensors are not those of {model.name}: {'; '.join(faults)}")
    with torch.no_grad():
        packed = model.packed_on(ranks.tp.size, ep=ranks.ep)
        weights = load_tensors(packed, quantized_tensors(packed, named), ranks.tp, ranks.device, _known(model))
    return _ready(model, weights, max_positions)


def dummy_model(
    folder: Path, dtype: torch.dtype | None, ranks: Ranks, max_positions: int | None = None, fp8: str = DEQUANTIZE
) -> tuple[Model, Any]:
    """As `load_model`, of a *folder* that need hold nothing but config.json: the weights are drawn on the device.

    Matrices normal(0, 0.02), norms 1, biases 0; any weights in *folder* are not looked at. *dtype*: None means
    config.json's. *fp8*: see `held`.
    Raises CheckpointError naming file and field, InvalidSetting for *dtype* (None, and config.json says none),
    *max_positions*, *fp8* and ranks that can not share the model.
    """
    model = held(read_config(folder), fp8)
    packed = model.packed_on(ranks.tp.size, ep=ranks.ep)
    if dtype is None and model.dtype is None:
        raise InvalidSetting("dtype", f"{folder / CONFIG} names none, so it must be given with dummy weights")
    model = evolve(model, dtype=_chosen(model, dtype, None))
    return model, _ready(model, dummy_tensors(packed, ranks.tp, ranks.device, _known(model)), max_positions)


def kv_layout(model: Model, tp: int, block_size: int, dtype: torch.dtype | None = None) -> tuple[KvLayout, ...]:
    """What each layer keeps of a token on one of *tp* ranks; the cache is of the model's dtype unless told.

    Raises InvalidSetting for a tp that can not share the heads.
    """
    return model.kv_layouts(model.config, tp, block_size, _known(model) if dtype is None else dtype)


def weight_sizes(model: Model, tp: int, dtype: torch.dtype | None = None, *, ep: bool = False) -> WeightSizes:
    """What the weights take on each of *tp* ranks, without reading any; *ep*: experts are spread over them.

    Raises InvalidSetting for ranks that can not share heads or experts.
    """
    packed = model.packed_on(tp, ep=ep)
    sizes = packed_bytes(packed, _known(model) if dtype is None else dtype, 0, tp)
    return WeightSizes(num_parameters(model.packed), sum(sizes), max(sizes))


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of most numbers stored in *folder*; only the heads of its files are read. Raises CheckpointError."""
    return _stored_dtype(open_checkpoint(folder))


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    count = dict.fromkeys(STORED_DTYPES, 0)
    for key, stored in checkpoint.tensors.items():
        if stored.dtype in count and not key.endswith(SCALES):
            count[stored.dtype] += int(torch.Size(stored.shape).numel())
    return STORED_DTYPES[max(count, key=lambda name: count[name])]


def _chosen(model: Model, told: torch.dtype | None, checkpoint: Checkpoint | None) -> torch.dtype:
    dtype = told or model.dtype or (_stored_dtype(checkpoint) if checkpoint else torch.float32)
    if dtype not in DTYPES.values():
        raise InvalidSetting("dtype", f"{dtype}; supported are {', '.join(DTYPES)}")
    return dtype


def _known(model: Model) -> torch.dtype:
    if model.dtype is None:
        raise InvalidSetting("dtype", f"{model.name}: config.json names none, so it must be given")
    return model.dtype


def _ready(model: Model, packed: Any, max_positions: int | None) -> Any:
    most = model.config.max_positions
    if max_positions is not None and not 1 <= max_positions <= most:
        raise InvalidSetting("max_model_len", f"{max_positions}; the model is made for 1 to {most} tokens")
    return model.ready(model.config, packed, most if max_positions is None else max_positions)
