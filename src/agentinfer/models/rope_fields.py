"""The rotary embedding's part of config.json, in its old and its new form.

Old: `rope_theta` and `rope_scaling` (with `type` or `rope_type`). New: all in `rope_parameters`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from attrs import frozen

from agentinfer.models.fields import Fields
from agentinfer.ops.rope import RopeSpec

_log = logging.getLogger(__name__)

MOST_POSITIONS: Final = 2**26
"""Of a model: what is more is a mistake, and its table of angles would not fit."""
_EVERYWHERE = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
_USED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": ("mrope_section",),  # with text alone all three sections count the same positions
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }
)
_SAME_AS: Mapping[str, str] = MappingProxyType({"mrope": "default"})
Kind = Literal["default", "linear", "llama3", "yarn"]


@frozen
class RopeDefaults:
    """What stands for fields that a config leaves out, and sizes that the rope depends on."""

    theta: float
    dim: int
    max_positions: int
    """max_position_embeddings."""


def read_rope(f: Fields, d: RopeDefaults) -> RopeSpec:
    """The rotary embedding that the config *f* describes.

    Where both forms are there and disagree, `rope_parameters` wins with a warning. Raises CheckpointError naming
    file and field; an unknown type is named with those that are known.
    """
    old_theta = f.number("rope_theta", d.theta, least=1.0)
    new, old = f.section("rope_parameters"), f.section("rope_scaling")
    s = new or old or Fields({}, f.where)
    nested = [name for name, value in s.raw.items() if isinstance(value, dict)]
    if nested:
        raise s.fault(nested[0], "a rope of its own for a kind of layer is not supported")
    if new is not None and old is not None and _meaning(new, old_theta) != _meaning(old, old_theta):
        _log.warning("%s: rope_parameters and rope_scaling disagree; rope_parameters wins", f.where)
    theta = s.number("rope_theta", old_theta, least=1.0)
    if f.raw.get("rope_theta") is not None and theta != old_theta:
        _log.warning("%s: rope_theta is %g outside and %g in %s; the latter wins", f.where, old_theta, theta, s.where)
    for place in (f, s):
        for name in ("partial_rotary_factor", "rotary_pct"):
            if place.number(name, 1.0) != 1.0:
                raise place.fault(name, f"{place.raw[name]!r}; only 1 (the whole head is rotated) is supported")
    kind = _kind(s)
    for name in sorted(set(s.raw).difference(_EVERYWHERE, _USED[kind])):
        _log.warning("%s: %s means nothing to a rope of type %s and is not used", s.where, name, kind)
    return _spec(s, kind, theta, d)


def longest(rope: RopeSpec, max_positions: int) -> int:
    """Positions that the model is made for: under YaRN at least what it stretches its original length to."""
    if rope.kind != "yarn":
        return max_positions
    return max(max_positions, int(rope.original_max_position * rope.factor))


def _meaning(s: Fields, theta: float) -> dict[str, Any]:
    """What *s* says, the same for both spellings."""
    said = {name: value for name, value in s.raw.items() if name not in {"type", "rope_type"}}
    return {"rope_theta": theta, **said, "type": s.raw.get("rope_type", s.raw.get("type", "default"))}


def _kind(s: Fields) -> Kind:
    name = "rope_type" if s.raw.get("rope_type") is not None else "type"
    kind = s.raw.get(name) if s.raw.get(name) is not None else "default"
    known = _SAME_AS.get(kind, kind) if isinstance(kind, str) else None
    if known not in _USED:
        raise s.fault(name, f"{kind!r} is unknown; known are {', '.join(_USED)}")
    other = _SAME_AS.get(str(s.raw.get("type")), s.raw.get("type"))
    if name == "rope_type" and other not in (None, known):
        _log.warning("%s: rope_type %s and type %s disagree; rope_type wins", s.where, kind, other)
    return cast("Kind", known)


def _spec(s: Fields, kind: Kind, theta: float, d: RopeDefaults) -> RopeSpec:
    if kind == "default":
        return RopeSpec(theta=theta, dim=d.dim)
    if kind == "linear":
        return RopeSpec(theta=theta, dim=d.dim, kind=kind, factor=s.number("factor"))
    original = s.integer("original_max_position_embeddings", d.max_positions)
    if kind == "llama3":
        low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
        if high <= low:
            raise s.fault("high_freq_factor", f"{high:g} must be above low_freq_factor {low:g}")
        return RopeSpec(
            theta=theta,
            dim=d.dim,
            kind=kind,
            factor=s.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(s, theta, d, original)


def _yarn(s: Fields, theta: float, d: RopeDefaults, original: int) -> RopeSpec:
    name = "original_max_position_embeddings"
    factor = s.number("factor", d.max_positions / original if name in s.raw else None)
    if original > d.max_positions:
        raise s.fault(name, f"{original} is more than max_position_embeddings {d.max_positions}")
    if original * factor > MOST_POSITIONS:
        raise s.fault("factor", f"{factor:g} times {name} {original} is more than {MOST_POSITIONS} positions")
    explicit = s.number("attention_factor") if s.raw.get("attention_factor") is not None else None
    fast, slow = s.number("beta_fast", 32.0), s.number("beta_slow", 1.0)
    if fast < slow:
        raise s.fault("beta_fast", f"{fast:g} must not be below beta_slow {slow:g}")
    return RopeSpec(
        theta=theta,
        dim=d.dim,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=s.number("mscale", 0.0, least=-1.0),
        mscale_all_dim=s.number("mscale_all_dim", 0.0, least=-1.0),
        attention_factor=explicit,
        truncate=s.flag("truncate", default=True),
    )
