"""Weights held in 8 bits: the tree of weights whose matrices are numbers of 8 bits and scales, each cut as its weight.

A scale is of 128 x 128 numbers of the checkpoint, so a rank's part must begin where a block does, and only the last
part of a fused weight may end elsewhere. Others are refused: they can be held in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.models.fp8 import SCALES, scales_shape
from agentinfer.models.weights import Fused, Part, Spec, local_shape, part_of, tree_leaves, tree_map
from agentinfer.ops.scaled import BLOCK, FLOAT8, Scaled, quantized


def in_8_bits(packed: Any, ranks: int) -> Any:
    """*packed* (a tree of Fused) with a Scaled of two Fused for each that may be held in 8 bits.

    Raises InvalidSetting naming a weight of which one of *ranks* would hold a part that is no whole blocks.
    """
    checked: set[tuple[object, ...]] = set()  # experts are many, and alike

    def one(fused: Fused) -> Any:
        if not all(spec.quantizable for spec in fused.parts):
            return fused
        scales = tuple(_scales_of(spec) for spec in fused.parts)
        for spec, of_it in zip(fused.parts, scales, strict=True):
            last = spec is fused.parts[-1]
            alike = (spec.shape, spec.cut, spec.unit, spec.share, spec.pad, spec.whole, last)
            if alike not in checked:
                _check(spec, of_it, ranks, last=last)
                checked.add(alike)
        return Scaled(Fused(tuple(evolve(spec, dtype=FLOAT8) for spec in fused.parts)), Fused(scales))

    return tree_map(one, packed)


def quantized_tensors(packed: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """*tensors* by name, those that *packed* (what `in_8_bits` gives) wants in 8 bits rounded to that, with scales."""
    wanted = [spec.name for leaf in tree_leaves(packed) for spec in leaf.parts if spec.dtype == FLOAT8]
    made = dict(tensors)
    for name in wanted:
        rounded = quantized(tensors[name])
        made |= {name: rounded.stored, name + SCALES: rounded.scales}
    return made


def _scales_of(spec: Spec) -> Spec:
    """The scales of *spec*, a weight by itself: cut as that is, in blocks."""
    whole_units = spec.unit % BLOCK == 0
    return evolve(
        spec,
        name=spec.name + SCALES,
        shape=scales_shape(spec.shape),
        unit=spec.unit // BLOCK if whole_units else 1,
        share=spec.share and whole_units,
        pad=spec.pad or not whole_units,
        dtype=torch.float32,
        kind="scales",
    )


def _check(spec: Spec, scales: Spec, ranks: int, *, last: bool) -> None:
    """Raises InvalidSetting unless each of *ranks* holds whole blocks of *spec*, and their *scales*."""
    if spec.cut is not None and not spec.whole:
        for rank in range(ranks):
            part = part_of(spec, rank, ranks)
            blocks = Part(part.start // BLOCK, -(-part.stop // BLOCK), -(-part.length // BLOCK))
            if part.start < part.stop and (part.start % BLOCK or part_of(scales, rank, ranks) != blocks):
                raise _refused(spec, f"rank {rank} of {ranks} would begin at {part.start} of {spec.shape[spec.cut]}")
    rows = spec.shape[0] if spec.whole else local_shape(spec, 0, ranks)[0]
    if rows % BLOCK and not last:
        raise _refused(spec, f"{rows} rows lie before others of one product")


def _refused(spec: Spec, why: str) -> InvalidSetting:
    return InvalidSetting("fp8", f"native: {spec.name}: {why}, which is no multiple of {BLOCK}; fp8 dequantize can")
