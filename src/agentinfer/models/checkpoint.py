"""Which file of a model folder holds which tensor, and reading parts of them.

Knows safetensors files and their index. Must not know what a tensor means to a model. The index, where there is one,
is authoritative; else `model.safetensors`; else all `model-*-of-*.safetensors`. Nothing else is ever opened.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentinfer.errors import CheckpointError
from agentinfer.models.folder import member, read_json_if_there

_log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAPPED_BYTES = 8 << 20
_WIDEST = 4  # bytes a number, float32: what is read is never wider
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@frozen(eq=False)
class Stored:
    """A tensor in a file: nothing of it is read yet."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: F32, BF16, I64, ..."""
    scales: Stored | None = None
    """What its blocks are to be multiplied by (see fp8); None: it is what it says."""


@frozen(eq=False)
class Checkpoint:
    """The tensors of a model folder."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Stored]


Where = tuple[slice, ...]
"""One slice an axis, with start and stop; axes left out are whole."""
Read = Callable[[Stored, Where], Tensor]
"""That part of a tensor, on the CPU: a view of the mapped file, so copy it and let go of it."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """What is where in *folder*, from the index and the heads of the files. Logs the files chosen.

    Raises CheckpointError naming file and key: no weights, a bad index, files that are missing, leave the folder or
    are corrupt or truncated, tensors that are not where the index says, or in two files.
    """
    index = read_json_if_there(folder, INDEX)
    checkpoint = _indexed(folder, index) if index is not None else _unindexed(folder)
    _log.info("%s: weights are read from %s", folder, ", ".join(path.name for path in checkpoint.files))
    return checkpoint


@contextmanager
def reader() -> Generator[Read]:
    """Read parts of tensors. At most MAPPED_BYTES of files (or one part, if larger) stay mapped between two reads."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        mapped = 0

        def read(stored: Stored, where: Where) -> Tensor:
            nonlocal mapped
            touched = _rows(stored, where) * math.prod(stored.shape[1:]) * _WIDEST
            if mapped + touched > MAPPED_BYTES:
                handles.clear()
                stack.close()
                mapped = 0
            mapped += touched
            if stored.file not in handles:
                handles[stored.file] = stack.enter_context(_opened(stored.file))
            try:
                return cast(Tensor, handles[stored.file].get_slice(stored.key)[where])
            except (SafetensorError, OSError, ValueError) as e:
                raise CheckpointError(f"{stored.file}: {stored.key}: can not be read: {e}") from e

        yield read
        handles.clear()


def _rows(stored: Stored, where: Where) -> int:
    return where[0].stop - where[0].start if where and where[0].stop is not None else stored.shape[0]


def _indexed(folder: Path, index: Mapping[str, Any]) -> Checkpoint:
    path = folder / INDEX
    mapped: object = index.get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointError(f"{path}: weight_map: must be a non-empty object")
    where = cast("dict[str, Any]", mapped)
    found: dict[str, Path | None] = {}
    for key, name in where.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: weight_map: {key}: {name!r} is no file name")
        if name not in found:
            found[name] = member(folder, name, f"{INDEX} for {key}")
    missing = sorted(name for name, file in found.items() if file is None)
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(f"{path}: names files that are missing (was the download complete?): {names}")
    files = {name: file for name, file in sorted(found.items()) if file is not None}
    heads = {name: _head(file) for name, file in files.items()}
    lost = [f"{key} is not in {name}" for key, name in where.items() if key not in heads[name]]
    if lost:
        raise CheckpointError(f"{path}: {'; '.join(lost)}")
    passed = sorted(f"{key} in {name}" for name, head in heads.items() for key in head if where.get(key) != name)
    if passed:
        _log.warning("%s: not in the index, so not read: %s", folder, ", ".join(passed))
    return Checkpoint(folder, tuple(files.values()), {key: heads[name][key] for key, name in where.items()})


def _unindexed(folder: Path) -> Checkpoint:
    single = member(folder, SINGLE)
    if single is not None:
        return Checkpoint(folder, (single,), _head(single))
    names = sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name)) if folder.is_dir() else []
    if not names:
        raise CheckpointError(f"{folder}: holds no weights: no {INDEX}, no {SINGLE}, no model-*-of-*.safetensors")
    files = [file for name in names if (file := member(folder, name)) is not None]
    parts = {(int(m[1]), int(m[2])) for file in files if (m := _SHARD.fullmatch(file.name))}
    totals = {total for _, total in parts}
    if len(totals) != 1:
        raise CheckpointError(f"{folder}: shards of more than one set ({', '.join(names)}) and no {INDEX}")
    missing = [i for i in range(1, max(totals) + 1) if (i, max(totals)) not in parts]
    if missing:
        lost = f"of {max(totals)} shards these are missing (was the download complete?): {missing}"
        raise CheckpointError(f"{folder}: {lost}")
    tensors: dict[str, Stored] = {}
    for file in files:
        for key, stored in _head(file).items():
            if key in tensors:
                both = f"{tensors[key].file.name} and {file.name}"
                raise CheckpointError(f"{folder}: {key} is in both {both}, and there is no {INDEX}")
            tensors[key] = stored
    return Checkpoint(folder, tuple(files), tensors)


def _head(file: Path) -> dict[str, Stored]:
    """The tensors that *file* says it holds. Its length is checked against them."""
    with _opened(file) as f:
        found: dict[str, Stored] = {}
        for key in f.keys():  # noqa: SIM118 - no mapping
            part = f.get_slice(key)
            found[key] = Stored(file, key, tuple(part.get_shape()), str(part.get_dtype()))
        return found


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    try:
        handle: Any = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{file}: truncated, corrupt or unreadable: {e}") from e
    with handle:
        yield handle
