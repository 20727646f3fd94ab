"""Files of a model folder: which ones may be opened, and what is in the JSON ones.

Knows the file system. Must not know what any field or tensor means. Nothing outside of the model folder is ever
opened, with one documented exception: the Hugging Face hub cache keeps `models--x/snapshots/REVISION/FILE` as a
symbolic link to `models--x/blobs/HASH`, and exactly that layout is followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from agentinfer.errors import CheckpointError


def member(folder: Path, name: str, said_by: str = "") -> Path | None:
    """The path of the file *name* of *folder*, or None if there is none. *said_by*: what names it, for the error.

    *name* must be a plain file name. The file is not opened. Raises CheckpointError naming *name* where it would
    lead out of the folder.
    """
    by = f" (named by {said_by})" if said_by else ""
    if not name or name in {".", ".."} or any(c in name for c in "/\\\0") or Path(name).name != name:
        raise CheckpointError(f"{folder}: {name!r}{by} is no plain file name inside of the model folder")
    path = folder / name
    if not path.is_symlink():
        return path if path.is_file() else None
    try:
        home, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not (target.is_relative_to(home) or target.parent == blobs):
        raise CheckpointError(f"{folder}: {name!r}{by} is a link that leaves the model folder")
    return path if target.is_file() else None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file *name* of *folder*. Raises CheckpointError naming the file."""
    found = read_json_if_there(folder, name)
    if found is None:
        why = "" if folder.is_dir() else f"; {folder} is no folder"
        raise CheckpointError(f"{folder / name}: missing{why}")
    return found


def read_json_if_there(folder: Path, name: str) -> dict[str, Any] | None:
    """As `read_json`, but None where there is no such file."""
    path = member(folder, name)
    if path is None:
        return None
    try:
        found: object = json.loads(path.read_text("utf-8"), object_pairs_hook=_object)
    except OSError as e:
        raise CheckpointError(f"{path}: can not be read: {e}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: no valid JSON: {e}") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return cast("dict[str, Any]", found)


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"{next(k for k in names if names.count(k) > 1)!r} is given twice")
    return found
