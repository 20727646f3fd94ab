"""Rotary position embedding: frequencies of every scaling kind, one cos/sin table, and its application in both pair
styles.

Shapes: T positions, N heads, D head dim, P rope dim (P <= D; the first P numbers of a head are rotated).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from attrs import Attribute, field, frozen
from torch import Tensor

KINDS = ("default", "linear", "llama3", "yarn")


def _positive(_: Any, attribute: Attribute[Any], value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"rope {attribute.name} must be positive and finite, not {value!r}")


def _even(_: Any, attribute: Attribute[Any], value: int) -> None:
    if value <= 0 or value % 2:
        raise ValueError(f"rope {attribute.name} must be a positive even number, not {value!r}")


def _known(_: Any, attribute: Attribute[Any], value: str) -> None:
    if value not in KINDS:
        raise ValueError(f"rope {attribute.name} {value!r} is unknown; known: {', '.join(KINDS)}")


@frozen
class RopeSpec:
    """How positions are encoded. Fields that a kind does not name are not read by it. Raises ValueError naming the
    field.
    """

    theta: float = field(validator=_positive)
    dim: int = field(validator=_even)
    """Rotated numbers a head."""
    kind: Literal["default", "linear", "llama3", "yarn"] = field(default="default", validator=_known)
    factor: float = field(default=1.0, validator=_positive)
    """linear, llama3, yarn: how many times longer than trained."""
    original_max_position: int = field(default=2048, validator=_positive)
    """llama3, yarn: positions that it was trained for."""
    low_freq_factor: float = field(default=1.0, validator=_positive)
    """llama3."""
    high_freq_factor: float = field(default=4.0, validator=_positive)
    """llama3."""
    beta_fast: float = field(default=32.0, validator=_positive)
    """yarn."""
    beta_slow: float = field(default=1.0, validator=_positive)
    """yarn."""
    mscale: float = 0.0
    """yarn of DeepSeek; 0: not given."""
    mscale_all_dim: float = 0.0
    """yarn of DeepSeek; 0: not given."""
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied by; None: derived from the factor and the mscales."""
    truncate: bool = True
    """yarn: round the ramp's bounds to whole dimensions."""


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """m(mscale) = 0.1 * mscale * ln(factor) + 1; 1 when nothing is stretched. **Source**: Peng et al. 2023, 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def magnitude(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1 but for yarn."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_magnitude(spec.factor, spec.mscale) / yarn_magnitude(spec.factor, spec.mscale_all_dim)
    return yarn_magnitude(spec.factor)


def latent_softmax_scale(spec: RopeSpec, qk_head_dim: int) -> float:
    """The softmax scale of multi-head latent attention: qk_head_dim^-0.5, times m(mscale_all_dim)^2 under yarn when
    that is set.

    **Source**: DeepSeek-V2 modeling file, DeepseekV2Attention.softmax_scale.
    """
    scale = qk_head_dim**-0.5
    if spec.kind == "yarn" and spec.mscale_all_dim:
        scale *= yarn_magnitude(spec.factor, spec.mscale_all_dim) ** 2
    return scale


def yarn_bounds(spec: RopeSpec) -> tuple[float, float]:
    """The dimensions between which yarn blends from extrapolated to interpolated: those that turn beta_fast and
    beta_slow times.
    """

    def dimension(turns: float) -> float:
        return spec.dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, spec.dim - 1)


def inv_freq(spec: RopeSpec) -> Tensor:
    """Radians a position of each pair, [P / 2] float32 on the CPU.

    **Source**: Su et al. 2021; linear: Chen et al. 2023; llama3: Llama 3.1 reference code; yarn: Peng et al. 2023.
    """
    turning = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).to(torch.float32) / spec.dim))
    if spec.kind == "default":
        return turning
    if spec.kind == "linear":
        return turning / spec.factor
    if spec.kind == "llama3":
        wavelength = 2 * math.pi / turning
        turns = spec.original_max_position / wavelength
        smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        blended = (1 - smooth) * turning / spec.factor + smooth * turning
        long, short = (
            wavelength > spec.original_max_position / spec.low_freq_factor,
            wavelength < spec.original_max_position / spec.high_freq_factor,
        )
        return torch.where(long, turning / spec.factor, torch.where(short, turning, blended))
    low, high = yarn_bounds(spec)
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return turning / spec.factor * (1 - keep) + turning * keep


def cos_sin(spec: RopeSpec, max_positions: int, device: str | torch.device = "cpu") -> Tensor:
    """The table of all positions, [max_positions, P] float32: first half cos, second half sin, both times
    `magnitude(spec)`.

    One table serves all layers that share *spec*.
    """
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(-1) * inv_freq(spec)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude(spec)).to(device)


def gather_rope(cos_sin_PP: Tensor, positions_T: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The factors of a number itself and of its partner, shaped for `rotate`: broadcastable to [T, N, 2, P/2]
    (interleaved [T, N, P/2, 2]).
    """
    cos, sin = cos_sin_PP.index_select(0, positions_T).chunk(2, dim=-1)
    axis = -1 if interleaved else -2
    return cos.unsqueeze(1).unsqueeze(axis), torch.stack((-sin, sin), dim=axis).unsqueeze(1)


def rotate(x_TND: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate every pair of x by the factors of `gather_rope`; new memory. Float32 inside. Numbers past the rope dim
    stay as they are.

    The pairs are (i, i + P/2), or (2i, 2i + 1) if *interleaved*.
    """
    axis = -1 if interleaved else -2
    turned = 2 * cos.shape[-2 if interleaved else -1]
    wide = x_TND[..., :turned].to(torch.float32)
    pairs = wide.view(*wide.shape[:-1], *((turned // 2, 2) if interleaved else (2, turned // 2)))
    out = torch.addcmul(pairs * cos, pairs.flip(axis), sin).flatten(-2).to(x_TND.dtype)
    return out if turned == x_TND.shape[-1] else torch.cat((out, x_TND[..., turned:]), dim=-1)


def rotary_embedding(
    positions_T: Tensor, q_TND: Tensor, k_TND: Tensor, cos_sin_PP: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys (of any two numbers of heads) to their positions. New memory, dtypes kept."""
    cos, sin = gather_rope(cos_sin_PP, positions_T, interleaved=interleaved)
    return rotate(q_TND, cos, sin, interleaved=interleaved), rotate(k_TND, cos, sin, interleaved=interleaved)
