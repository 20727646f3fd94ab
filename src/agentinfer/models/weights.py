"""Weights: described once as a tree of Spec; loaded, cut over ranks, fused, sized and drawn at random from that tree.

Knows shapes, names, cuts and dtypes. Must not know what a weight does in a model.

A *tree* is an attrs record, a tuple, None or a leaf, nested; leaves are Spec, Fused or Tensor. A rank's part:

=================================== ============================ ===========================================
axis `cut` has U units (heads, ..)  rank r of n holds            where
=================================== ============================ ===========================================
n divides U                         units r*U/n .. (r+1)*U/n
`share` and U divides n             unit r // (n/U)              KV heads: n/U neighbours hold the same one
`pad`                               ceil(U/n) units, the last    vocabulary and feed-forward width: zeros
                                    ones of the last ranks zero  never win and never add anything
`whole`                             all of it, or nothing        experts, E/n of them on each rank
=================================== ============================ ===========================================
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.checkpoint import MAPPED_BYTES, Checkpoint, Stored, Where, reader
from agentinfer.models.fp8 import SCALES, covering, scales_shape
from agentinfer.models.fp8 import STORED as FP8
from agentinfer.ops.comm import Group
from agentinfer.ops.scaled import FLOAT8, LARGEST, dequantized

_log = logging.getLogger(__name__)

STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
)
_WIDEST = 4  # bytes a stored number, at most
_EIGHT_BIT_STD = 64.0  # of what 8 bits hold of dummy weights: their largest number, 448, is seven of it


@frozen
class Spec:
    """A weight before it exists."""

    name: str
    """Its key in the checkpoint, as the model knows it."""
    shape: tuple[int, ...]
    """All of it, as in the checkpoint."""
    cut: int | None = None
    """The axis that tensor parallelism cuts; None: every rank holds all of it."""
    unit: int = 1
    """Numbers along `cut` that stay together: a head."""
    share: bool = False
    pad: bool = False
    expert: tuple[int, int] | None = None
    """Which expert of how many it is of; None: of none."""
    whole: bool = False
    """Not cut: the rank that has its expert holds all of it, the others no row of it."""
    dtype: torch.dtype | None = None
    """None: the model's."""
    kind: Literal["matrix", "norm", "bias", "scales"] = "matrix"
    """What random test weights look like; "scales" are those of a matrix in 8 bits, named as it with SCALES behind."""
    quantizable: bool = False
    """May be held in 8 bits."""


@frozen
class Fused:
    """Weights that are held as one tensor, one under the other along axis 0."""

    parts: tuple[Spec, ...]


@frozen
class Part:
    """What one rank holds of an axis: numbers start .. stop - 1 of the checkpoint, then zeros up to `length`."""

    start: int
    stop: int
    length: int


def part_of(spec: Spec, rank: int, size: int) -> Part:
    """Which part of its cut axis rank *rank* of *size* holds. Raises InvalidSetting where they can not share it."""
    if spec.cut is None:
        raise ValueError(f"{spec.name} is not cut")
    full = spec.shape[spec.cut]
    if spec.whole and spec.expert is not None:
        which, count = spec.expert
        if count % size:
            raise InvalidSetting("ep", f"{size} ranks can not share {count} experts")
        return Part(0, full, full) if which // (count // size) == rank else Part(0, 0, 0)
    units = full // spec.unit
    if spec.share and units < size and size % units == 0:
        start = rank // (size // units) * spec.unit
        return Part(start, start + spec.unit, spec.unit)
    if units % size and not spec.pad:
        raise InvalidSetting("tp", f"{size} ranks can not share {units} units of {spec.name}")
    length = -(-units // size) * spec.unit
    start = min(rank * length, full)
    return Part(start, min(start + length, full), length)


def local_shape(spec: Spec, rank: int, size: int) -> tuple[int, ...]:
    """The shape of that rank's part."""
    if spec.cut is None:
        return spec.shape
    return (*spec.shape[: spec.cut], part_of(spec, rank, size).length, *spec.shape[spec.cut + 1 :])


def fused_shape(fused: Fused, rank: int, size: int) -> tuple[int, ...]:
    """The shape of that rank's part of all of *fused*."""
    shapes = [local_shape(spec, rank, size) for spec in fused.parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def spread_experts(packed: Any) -> Any:
    """*packed* (a tree of Fused), whose experts lie whole on some rank each instead of being cut by width."""

    def one(spec: Spec) -> Spec:
        return spec if spec.expert is None else attrs.evolve(spec, cut=0, unit=1, pad=False, whole=True)

    return tree_map(lambda fused: Fused(tuple(one(spec) for spec in fused.parts)), packed)


def tree_map(f: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with *f* of every leaf."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple(tree_map(f, x) for x in cast("tuple[Any, ...]", tree))
    kind = cast("type[Any]", type(tree))
    if attrs.has(kind) and not isinstance(tree, Spec | Fused):
        return kind(*(tree_map(f, getattr(tree, field.name)) for field in attrs.fields(kind)))
    return f(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Every leaf, in order."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def num_parameters(specs: Any) -> int:
    """Numbers in the whole model. *specs*: a tree of Spec or Fused."""
    return sum(int(np.prod(spec.shape)) for spec in _each(specs))


def packed_bytes(packed: Any, dtype: torch.dtype, rank: int, size: int) -> tuple[int, ...]:
    """Bytes of each leaf of *packed* (a tree of Fused) on that rank, padding and shared heads included."""

    def one(fused: Fused) -> int:
        numbers = int(np.prod(fused_shape(fused, rank, size)))
        return numbers * (fused.parts[0].dtype or dtype).itemsize

    return tuple(one(fused) for fused in tree_leaves(packed))


def _each(tree: Any) -> Iterator[Spec]:
    for leaf in tree_leaves(tree):
        yield from leaf.parts if isinstance(leaf, Fused) else (leaf,)


def match(checkpoint: Checkpoint, specs: Any, rename: Callable[[str], str | None]) -> dict[str, Stored]:
    """The stored tensor of each Spec of the tree *specs*, by name; those in 8 bits with their scales.

    *rename*: a key of the checkpoint -> the model's name for it, None where it is known to be of no use.
    Raises CheckpointError that lists all that is missing, unexpected, of a wrong shape or dtype.
    """
    wanted = {spec.name: spec for spec in _each(specs)}
    found: dict[str, Stored] = {}
    faults: list[str] = []
    unused: list[str] = []
    for key, stored in checkpoint.tensors.items():
        name = rename(key.removesuffix(SCALES))
        if name is not None and key.endswith(SCALES):
            continue
        if name is None:
            unused.append(key)
        elif name in found:
            faults.append(f"both {found[name].key} and {key} hold {name}")
        elif name in wanted:
            found[name] = stored
        else:
            faults.append(f"unexpected: {key} in {stored.file.name}")
    if unused:
        _log.info("%s: %d tensors are knowingly not used, %s among them", checkpoint.folder, len(unused), unused[0])
    faults += [f"missing: {name}" for name in wanted if name not in found]
    faults += _take_scales(checkpoint, found, rename)
    for name, stored in found.items():
        if stored.shape != wanted[name].shape:
            faults.append(
                f"{stored.file.name}: {stored.key} has shape {stored.shape}, the model wants {wanted[name].shape}"
            )
        if stored.dtype not in STORED_DTYPES and stored.scales is None:
            why = " without its scales" if stored.dtype.startswith("F8") else ""
            good = ", ".join(STORED_DTYPES)
            faults.append(f"{stored.file.name}: {stored.key} is of {stored.dtype}{why}; weights must be {good}")
    if faults:
        raise CheckpointError(f"{checkpoint.folder}: the weights do not fit config.json: {'; '.join(faults)}")
    return found


def _take_scales(
    checkpoint: Checkpoint, found: dict[str, Stored], rename: Callable[[str], str | None]
) -> list[str]:  # fmt: skip
    """Put the scales of *checkpoint* beside their weights in *found*, in place; what is wrong with them, in words."""
    faults: list[str] = []
    for key, scales in checkpoint.tensors.items():
        name = rename(key.removesuffix(SCALES))
        if name is None or not key.endswith(SCALES):
            continue
        weight, where = found.get(name), f"{key} in {scales.file.name}"
        if weight is None:
            faults.append(f"unexpected: {where}")
        elif weight.dtype != FP8 or len(weight.shape) != 2:
            faults.append(f"unexpected: {where}: {weight.key} is of {weight.dtype} and needs no scales")
        elif scales.shape != scales_shape(weight.shape) or scales.dtype not in STORED_DTYPES:
            wanted = f"{', '.join(STORED_DTYPES)} of shape {scales_shape(weight.shape)}"
            faults.append(f"{where} is {scales.dtype} of shape {scales.shape}; {weight.key} wants {wanted}")
        else:
            found[name] = attrs.evolve(weight, scales=scales)
    return faults


def load(packed: Any, found: Mapping[str, Stored], tp: Group, device: torch.device, dtype: torch.dtype) -> Any:
    """Read this rank's part of every weight of *packed* (a tree of Fused), as a tree of Tensor on *device*.

    Reads only what this rank holds, a few MiB at a time: little more than the weights themselves is ever in memory.
    What is stored in 8 bits is multiplied out in float32 and rounded to *dtype* once, unless *packed* wants it so.
    Raises CheckpointError naming file and key for numbers that are not finite, in the file or once cast, and for a
    weight that is wanted in 8 bits and not stored so.
    """
    with reader() as read_stored:

        def read(spec: Spec, where: Where) -> Tensor:
            stored = found[spec.name.removesuffix(SCALES)]
            if spec.kind == "scales" or spec.dtype == FLOAT8:
                return read_stored(_in_8_bits(stored, spec), where)
            if stored.scales is None:
                return read_stored(stored, where)
            scales = read_stored(stored.scales, tuple(covering(part) for part in where))
            return dequantized(read_stored(stored, where), scales, tuple(part.start for part in where))

        def label(spec: Spec) -> str:
            stored = found[spec.name.removesuffix(SCALES)]
            return f"{stored.file}: {stored.key}"

        return tree_map(lambda fused: fill(fused, read, tp, device, dtype, label), packed)


def _in_8_bits(stored: Stored, spec: Spec) -> Stored:
    """What is wanted of a weight stored in 8 bits: itself or its scales."""
    if stored.scales is None:
        raise CheckpointError(f"{stored.file}: {stored.key} is of {stored.dtype}: fp8 native wants it in 8 bits")
    return stored.scales if spec.kind == "scales" else stored


def load_tensors(
    packed: Any, tensors: Mapping[str, Tensor], tp: Group, device: torch.device, dtype: torch.dtype
) -> Any:
    """As `load`, from *tensors* by name. One that already has this rank's shape is taken whole, never cut again."""

    def read(spec: Spec, where: Where) -> Tensor:
        x = tensors[spec.name]
        if tuple(x.shape) == spec.shape:
            return x[where]
        if tuple(x.shape) != local_shape(spec, tp.rank, tp.size) or spec.cut is None:
            raise CheckpointError(f"{spec.name} has shape {tuple(x.shape)}, the model wants {spec.shape}")
        first = part_of(spec, tp.rank, tp.size).start
        local = list(where)
        local[spec.cut] = slice(where[spec.cut].start - first, where[spec.cut].stop - first)
        return x[tuple(local)]

    return tree_map(lambda fused: fill(fused, read, tp, device, dtype, lambda spec: spec.name), packed)


Read = Callable[[Spec, Where], Tensor]
"""(weight, slices of the whole of it) -> that part."""


def fill(
    fused: Fused, read: Read, tp: Group, device: torch.device, dtype: torch.dtype, label: Callable[[Spec], str]
) -> Tensor:
    """One fused tensor of this rank. It starts as NaN, so a hole would show; *label* names a weight in an error."""
    shape = fused_shape(fused, tp.rank, tp.size)
    out = torch.full(shape, torch.nan, dtype=fused.parts[0].dtype or dtype, device=device)
    rows = [local_shape(spec, tp.rank, tp.size)[0] for spec in fused.parts]
    places = torch.split(out, rows)
    for spec, place in zip(fused.parts, places, strict=True):
        _fill_part(place, spec, read, tp)
    if not _finite(out):
        bad = [
            label(spec) for spec, place in zip(fused.parts, places, strict=True) if len(place) and not _finite(place)
        ]
        raise CheckpointError(f"{'; '.join(bad)}: holds NaN or infinity, or numbers too large for {out.dtype}")
    return out


def _fill_part(place: Tensor, spec: Spec, read: Read, tp: Group) -> None:
    """Copy what this rank holds of *spec* into *place*, some rows at a time; what is padding becomes zero."""
    parts = [Part(0, n, n) for n in spec.shape]
    if spec.cut is not None:
        parts[spec.cut] = part_of(spec, tp.rank, tp.size)
    rows, *columns = parts
    width = max(1, math.prod(spec.shape[1:]) * _WIDEST)
    step = max(1, MAPPED_BYTES // width)
    held = tuple(slice(0, p.stop - p.start) for p in columns)
    across = tuple(slice(p.start, p.stop) for p in columns)
    for axis, p in enumerate(parts):
        place.narrow(axis, p.stop - p.start, p.length - (p.stop - p.start)).zero_()
    if all(p.start < p.stop for p in columns):
        for at in range(rows.start, rows.stop, step):
            end = min(at + step, rows.stop)
            place[(slice(at - rows.start, end - rows.start), *held)].copy_(read(spec, (slice(at, end), *across)))


def _finite(x: Tensor) -> bool:
    if x.dtype == FLOAT8:  # which torch does not compare: its two NaN have all bits but the sign
        rows = max(1, MAPPED_BYTES // max(1, x[:1].numel()))
        return all(not bool(((part & 127) == 127).any()) for part in torch.split(x.view(torch.uint8), rows))
    low, high = torch.aminmax(x)  # both are NaN where any number is: no mask of x's size is made
    return bool(torch.isfinite(low) & torch.isfinite(high))


def random_tensors(specs: Any, std: float = 0.15, seed: int = 0) -> dict[str, Tensor]:
    """Whole float32 test weights of the tree *specs*, by name; each depends on its own name and *seed* alone.

    Matrices std * randn, norms 1 + 0.2 randn, biases 0.1 randn: large enough that any fault of a model shows.
    """

    def one(spec: Spec) -> Tensor:
        key = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
        draw = np.random.Generator(np.random.Philox(int.from_bytes(key, "little"))).standard_normal(
            spec.shape, np.float32
        )
        x = torch.as_tensor(draw)
        return {"matrix": x * std, "norm": 1 + 0.2 * x, "bias": 0.1 * x}[spec.kind]

    return {spec.name: one(spec) for spec in _each(specs)}


def dummy_tensors(
    packed: Any, tp: Group, device: torch.device, dtype: torch.dtype, std: float = 0.02, seed: int = 0
) -> Any:
    """This rank's part of every weight of *packed* (a tree of Fused), drawn on *device*: a tree of Tensor, as `load`.

    Matrices std * randn, norms 1, biases 0, padding 0, the numbers of a model before training; in 8 bits blocks of a
    matrix differ by their scales, from half of that to one and a half. No whole tensor ever exists beside its part, and
    ranks that hold the same part draw the same numbers.
    """

    def one(fused: Fused) -> Tensor:
        out = torch.empty(fused_shape(fused, tp.rank, tp.size), dtype=fused.parts[0].dtype or dtype, device=device)
        rows = [local_shape(spec, tp.rank, tp.size)[0] for spec in fused.parts]
        for spec, place in zip(fused.parts, torch.split(out, rows), strict=True):
            _draw(place, spec, tp, std, seed)
        return out

    return tree_map(one, packed)


def _draw(place: Tensor, spec: Spec, tp: Group, std: float, seed: int) -> None:
    """Fill *place* with what this rank holds of *spec*."""
    if spec.kind in ("norm", "bias"):
        place.fill_(1.0 if spec.kind == "norm" else 0.0)
    else:
        first = 0 if spec.cut is None else part_of(spec, tp.rank, tp.size).start
        key = hashlib.blake2b(f"{seed}/{spec.name}/{first}".encode(), digest_size=8).digest()
        noise = torch.Generator(place.device).manual_seed(int.from_bytes(key, "little"))
        if spec.kind == "scales":  # not all alike, so that one taken for another shows
            place.uniform_(0.5 * std / _EIGHT_BIT_STD, 1.5 * std / _EIGHT_BIT_STD, generator=noise)
        elif place.dtype == FLOAT8:
            drawn = torch.empty(place.shape, dtype=torch.float32, device=place.device)
            place.copy_(drawn.normal_(0.0, _EIGHT_BIT_STD, generator=noise).clamp_(-LARGEST, LARGEST))
        else:
            place.normal_(0.0, std, generator=noise)
    if spec.cut is not None:
        part = part_of(spec, tp.rank, tp.size)
        held = part.stop - part.start
        place.narrow(spec.cut, held, part.length - held).zero_()
