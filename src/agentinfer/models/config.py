"""config.json -> DenseConfig: every field that is used is checked, and what can not be served is refused by name.

Knows the field names of Hugging Face's config files, old and new. Must not know tensors, files of weights or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from attrs import frozen

from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.fields import Fields
from agentinfer.models.folder import read_json, read_json_if_there
from agentinfer.models.fp8 import check_quantization
from agentinfer.models.rope_fields import MOST_POSITIONS, RopeDefaults, longest, read_rope
from agentinfer.ops.rope import RopeSpec

_log = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
)
MOST_LAYERS = 10_000
"""Of a model: what is more is a mistake."""
_LARGEST_TP_NAMED = 8  # ranks of one host: what an error lists


@frozen
class DenseConfig:
    """A dense decoder (Qwen2, Qwen3, Llama), every field checked."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Tokens of the longest sequence that the rotary embedding is made for."""
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """[num_layers] keys that a query may attend to, itself included; None: all before it."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm of each query and key head before rope."""
    tied: bool
    """The embedding is the LM head."""
    dtype: torch.dtype | None
    """What the config asks for; None: it does not say."""
    eos_ids: tuple[int, ...]

    @property
    def scale(self) -> float:
        """What the attention scores are multiplied by."""
        return self.head_dim**-0.5


def architecture_of(raw: Mapping[str, Any], where: str) -> str:
    """`architectures[0]`. Raises CheckpointError naming the field."""
    found = raw.get("architectures")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise CheckpointError(f"{where}: architectures: must be a list of names, not {found!r}")
    return found[0]


def read_dense(raw: Mapping[str, Any], folder: Path) -> DenseConfig:
    """The config of a dense decoder from the JSON object *raw* of *folder*'s config.json.

    Raises CheckpointError naming file and field.
    """
    where = str(folder / CONFIG)
    architecture = architecture_of(raw, where)
    outer = Fields(raw, where)
    nested = outer.section("text_config")
    f = nested or outer
    qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    refuse_unsupported(f, outer)
    num_heads, num_layers = f.integer("num_attention_heads"), f.integer("num_hidden_layers", most=MOST_LAYERS)
    hidden_size, vocab_size = f.integer("hidden_size"), f.integer("vocab_size")
    num_kv_heads = _kv_heads(f, num_heads, may_be_missing=architecture.startswith("Llama"))
    head_dim = _head_dim(f, hidden_size, num_heads)
    max_positions = f.integer("max_position_embeddings", most=MOST_POSITIONS)
    rope = read_rope(f, RopeDefaults(1e6 if "VL" in architecture else 1e4, head_dim, max_positions))
    attention_bias = f.flag("attention_bias") and not qwen2
    return DenseConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=longest(rope, max_positions),
        norm_eps=f.number("rms_norm_eps"),
        rope=rope,
        windows=_windows(f, num_layers, llama=architecture.startswith("Llama")),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=f.flag("mlp_bias"),
        qk_norm=qwen3,
        tied=outer.flag("tie_word_embeddings") or f.flag("tie_word_embeddings"),
        dtype=dtype_of(outer, f),
        eos_ids=eos_of(folder, f, outer, vocab_size),
    )


def check_tp(config: DenseConfig, tp: int) -> None:
    """Whether *tp* ranks can share the heads. Raises InvalidSetting naming the tp that can."""
    if not _shares(config, tp):
        works = ", ".join(str(t) for t in range(1, _LARGEST_TP_NAMED + 1) if _shares(config, t))
        heads = f"{config.num_heads} heads and {config.num_kv_heads} KV heads"
        raise InvalidSetting("tp", f"{tp} ranks can not share {heads}; these can: {works}")


def _shares(config: DenseConfig, tp: int) -> bool:
    kv = config.num_kv_heads
    return tp >= 1 and config.num_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def refuse_unsupported(f: Fields, outer: Fields) -> None:
    """Raises CheckpointError naming the field for an activation or a form of weights that no model here has."""
    for fields in (f, outer):
        check_quantization(fields)
    if f.raw.get("hidden_act") != "silu":
        said = repr(f.raw["hidden_act"]) if "hidden_act" in f.raw else "missing"
        raise f.fault("hidden_act", f"{said}; only 'silu' is supported")


def _kv_heads(f: Fields, num_heads: int, *, may_be_missing: bool) -> int:
    """Null means one KV head a query head; old Llama files may leave the field out with the same meaning."""
    name = "num_key_value_heads"
    default = num_heads if may_be_missing or name in f.raw else None
    kv = f.integer(name, default)
    if num_heads % kv:
        raise f.fault(name, f"{kv} does not divide num_attention_heads {num_heads}")
    return kv


def _head_dim(f: Fields, hidden_size: int, num_heads: int) -> int:
    if f.raw.get("head_dim") is None and hidden_size % num_heads:
        raise f.fault("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = f.integer("head_dim", hidden_size // num_heads, least=2)
    if head_dim % 2:
        raise f.fault("head_dim", f"must be even for rotary embedding, not {head_dim}")
    return head_dim


def dtype_of(outer: Fields, f: Fields) -> torch.dtype | None:
    """What the config asks for, None if it does not say. `dtype`, the new key, wins over `torch_dtype` with a warning
    where they disagree.
    """
    names = ("torch_dtype", "dtype")
    said = {name: fields.raw[name] for fields in (f, outer) for name in names if fields.raw.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
            raise outer.fault(name, f"{value!r}; supported are {', '.join(DTYPES)}")
    found = {name: DTYPES[str(value).removeprefix("torch.")] for name, value in said.items()}
    if len(set(found.values())) > 1:
        new, old = said["dtype"], said["torch_dtype"]
        _log.warning("%s: dtype %s and torch_dtype %s disagree; dtype wins", outer.where, new, old)
    return found.get("dtype", found.get("torch_dtype"))


def _windows(f: Fields, num_layers: int, *, llama: bool) -> tuple[int | None, ...]:
    """The window of each layer, where `use_sliding_window` is on: `layer_types`, else `max_window_layers`."""
    if llama:
        if f.raw.get("sliding_window") is not None:
            raise f.fault("sliding_window", f"{f.raw['sliding_window']!r}; Llama models have no sliding window")
        enabled, window = False, None
    else:
        enabled = f.flag("use_sliding_window")
        window = f.integer("sliding_window") if enabled else None
    kinds = f.raw.get("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", least=0) if enabled else num_layers
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(cast("list[Any]", kinds)) != num_layers:
        raise f.fault("layer_types", f"must list {num_layers} layers (num_hidden_layers), not {kinds!r}")
    for kind in cast("list[Any]", kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise f.fault("layer_types", f"unknown kind {kind!r}; known are full_attention, sliding_attention")
        if kind == "sliding_attention" and not enabled:
            raise f.fault("layer_types", "names sliding_attention, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in cast("list[str]", kinds))


def eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a sequence of the model in *folder*: generation_config.json's, else config.json's, else none.

    Either may be an integer, a list or null. Ids outside of the vocabulary can never be sampled: left out with a
    warning. Raises CheckpointError naming file and field.
    """
    raw = read_json(folder, CONFIG)
    outer = Fields(raw, str(folder / CONFIG))
    f = outer.section("text_config") or outer
    return eos_of(folder, f, outer, f.integer("vocab_size"))


def eos_of(folder: Path, f: Fields, outer: Fields, vocab_size: int) -> tuple[int, ...]:
    """As `eos_ids`, of a config.json that has been read: *f* what describes the language model, *outer* all of it."""
    generation = read_json_if_there(folder, GENERATION_CONFIG)
    places = [outer, f] if generation is None else [Fields(generation, str(folder / GENERATION_CONFIG)), outer, f]
    for place in places:
        said = place.raw.get("eos_token_id")
        if said is None:
            continue
        ids = cast("list[Any]", said if isinstance(said, list) else [said])
        for token in ids:
            if type(token) is not int or token < 0:
                raise place.fault("eos_token_id", f"must be token ids, not {said!r}")
        outside = [token for token in ids if token >= vocab_size]
        if outside:
            _log.warning("%s: eos_token_id %s lies outside of the vocabulary of %d", place.where, outside, vocab_size)
        return tuple(dict.fromkeys(token for token in ids if token < vocab_size))
    return ()
