"""Weights stored as 8-bit floats with a scale for each block of 128 x 128, as DeepSeek-V3's are.

`X.weight` (F8_E4M3) is what is stored, `X.weight_scale_inv` what its blocks are to be *multiplied* by, whatever the
name says. The blocks at the right and the lower edge may be smaller. Held in the model's dtype they are multiplied out
in float32 and rounded once; or they are held as they are (`ops/scaled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agentinfer.models.fields import Fields
from agentinfer.ops.scaled import BLOCK

__all__ = [
    "DEQUANTIZE", "FP8", "NATIVE", "SCALES", "STORED", "check_quantization", "covering", "is_quantized", "scales_shape",
]  # fmt: skip

SCALES: Final = "_scale_inv"
"""What the key of the scales has behind that of their weight."""
STORED: Final = "F8_E4M3"
"""As safetensors names the dtype."""
DEQUANTIZE: Final = "dequantize"
"""Held in the model's dtype, multiplied out once."""
NATIVE: Final = "native"
"""Held in 8 bits, with their scales."""
FP8: Final = (DEQUANTIZE, NATIVE)


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are in 8 bits; in which way is `check_quantization`'s."""
    nested: object = raw.get("text_config")
    places = (raw, cast("dict[str, Any]", nested) if isinstance(nested, dict) else {})
    return any(place.get("quantization_config") is not None for place in places)


def check_quantization(f: Fields) -> None:
    """Raises CheckpointError naming the field if weights are stored in another way than this module reads."""
    raw: object = f.raw.get("quantization_config")
    if raw is None:
        return
    said = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {"quant_method": raw}
    wanted = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3", "activation_scheme": "dynamic"}
    for name, value in wanted.items():
        missing_is_fine = name in ("fmt", "activation_scheme") and said.get(name) is None
        if said.get(name) != value and not missing_is_fine:
            method = said.get("quant_method")
            why = f"{name} is {said.get(name)!r}; what can be read is {value!r}"
            raise f.fault("quantization_config", f"quantized weights ({method!r}): {why}")


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of that *shape*."""
    return tuple(-(-n // BLOCK) for n in shape)


def covering(part: slice) -> slice:
    """The blocks that numbers *part* of an axis lie in."""
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
