"""The experts' part of config.json, in the words of each family."""

from __future__ import annotations

from typing import Any, cast

from attrs import frozen

from agentinfer.models.fields import Fields
from agentinfer.ops.moe import Routing


@frozen
class ExpertConfig:
    """The experts of a model's layers, every field checked."""

    num_experts: int
    width: int
    """Of one expert."""
    shared_width: int
    """Of all shared experts together, which are one dense MLP; 0: there are none."""
    biased: bool
    """The router has a bias that takes part in the choice alone."""
    routing: Routing
    layers: tuple[bool, ...]
    """[num_layers] whether a layer has experts; it is dense otherwise."""


def deepseek_experts(f: Fields, num_layers: int, *, v3: bool) -> ExpertConfig:
    """Of DeepSeek-V2 and V3. Raises CheckpointError naming file and field."""
    num_experts, width = f.integer("n_routed_experts"), f.integer("moe_intermediate_size")
    first = f.integer("first_k_dense_replace", least=0)
    every = f.integer("moe_layer_freq", 1)
    none = "n_shared_experts" in f.raw and f.raw["n_shared_experts"] is None
    shared = 0 if none else f.integer("n_shared_experts", least=0)
    return ExpertConfig(
        num_experts=num_experts,
        width=width,
        shared_width=shared * width,
        biased=v3,
        routing=(_v3 if v3 else _v2)(f, num_experts),
        layers=tuple(i >= first and i % every == 0 for i in range(num_layers)),
    )


def qwen3_experts(f: Fields, num_layers: int) -> ExpertConfig:
    """Of Qwen3-MoE. Raises CheckpointError naming file and field."""
    name = "num_experts" if "num_experts" in f.raw else "num_local_experts"
    num_experts = f.integer(name)
    step = f.integer("decoder_sparse_step", 1)
    dense = _layer_numbers(f, "mlp_only_layers", num_layers)
    return ExpertConfig(
        num_experts=num_experts,
        width=f.integer("moe_intermediate_size"),
        shared_width=0,
        biased=False,
        routing=Routing(_top_k(f, num_experts), "softmax", normalise=f.flag("norm_topk_prob")),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def _v2(f: Fields, num_experts: int) -> Routing:
    """Weights are normalised or scaled, not both. **Source**: MoEGate of the DeepSeek-V2 modeling file."""
    _only(f, "scoring_func", "softmax")
    top_k, scale = _top_k(f, num_experts), f.number("routed_scaling_factor")
    normalise = f.flag("norm_topk_prob") and top_k > 1
    method = f.raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise f.fault("topk_method", f"{method!r}; DeepSeek-V2 knows 'greedy' and 'group_limited_greedy'")
    groups, kept = (1, 1) if method == "greedy" else _groups(f, num_experts, top_k, least=1)
    return Routing(top_k, "softmax", normalise, 1.0 if normalise else scale, groups, kept, "max")


def _v3(f: Fields, num_experts: int) -> Routing:
    """Weights are scaled, normalised or not. **Source**: MoEGate of the DeepSeek-V3 modeling file."""
    _only(f, "scoring_func", "sigmoid")
    _only(f, "topk_method", "noaux_tc")
    top_k = _top_k(f, num_experts)
    groups, kept = _groups(f, num_experts, top_k, least=2)  # a group is scored by two of its experts
    normalise = f.flag("norm_topk_prob", default=True)
    return Routing(top_k, "sigmoid", normalise, f.number("routed_scaling_factor"), groups, kept, "top2")


def _top_k(f: Fields, num_experts: int) -> int:
    return f.integer("num_experts_per_tok", most=num_experts)


def _only(f: Fields, name: str, value: str) -> None:
    if f.raw.get(name) not in (None, value):
        raise f.fault(name, f"{f.raw[name]!r}; this architecture has {value!r}")


def _groups(f: Fields, num_experts: int, top_k: int, *, least: int) -> tuple[int, int]:
    """(groups, groups kept). *least*: experts that a group must have, if there are several."""
    groups = f.integer("n_group")
    kept = f.integer("topk_group", most=groups)
    size = num_experts // groups
    if num_experts % groups or (groups > 1 and size < least):
        raise f.fault("n_group", f"{groups} groups can not share n_routed_experts {num_experts}, {least} or more each")
    if kept * size < top_k:
        raise f.fault("topk_group", f"{kept} groups of {size} experts are less than num_experts_per_tok {top_k}")
    return groups, kept


def _layer_numbers(f: Fields, name: str, num_layers: int) -> frozenset[int]:
    raw: object = f.raw.get(name)
    said = cast("list[Any]", raw) if isinstance(raw, list) else [] if raw is None else [None]
    if any(type(i) is not int or not 0 <= i < num_layers for i in said):
        raise f.fault(name, f"must list layers from 0 to {num_layers - 1}, not {raw!r}")
    return frozenset(cast("list[int]", said))
