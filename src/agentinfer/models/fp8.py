"""Weights stored as 8-bit floats with a scale for each block of 128 x 128, as DeepSeek-V3's are.

`X.weight` (F8_E4M3) is what is stored, `X.weight_scale_inv` what its blocks are to be *multiplied* by, whatever the
name says. The blocks at the right and the lower edge may be smaller. Read back they are float32, rounded once by who
holds them.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from agentinfer.models.fields import Fields

__all__ = ["BLOCK", "SCALES", "STORED", "check_quantization", "covering", "dequantized", "scales_shape"]

BLOCK: Final = 128
"""Rows and columns of a block."""
SCALES: Final = "_scale_inv"
"""What the key of the scales has behind that of their weight."""
STORED: Final = "F8_E4M3"
"""As safetensors names the dtype."""


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


def dequantized(stored: Tensor, scales: Tensor, first: tuple[int, ...]) -> Tensor:
    """A part of a weight in float32. *stored* begins at row and column *first* of the whole; *scales* are those of the
    blocks that cover it.
    """
    out = stored.to(torch.float32)
    for axis, start in enumerate(first):
        block = torch.arange(start, start + stored.shape[axis], device=stored.device) // BLOCK - start // BLOCK
        scales = scales.index_select(axis, block)
    return out.mul_(scales.to(torch.float32))
