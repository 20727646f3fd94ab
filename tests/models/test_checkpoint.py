"""Which files of a folder are read, which are refused, and that nothing outside of it is ever opened."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentinfer.errors import CheckpointError
from agentinfer.models import checkpoint as checkpoints
from agentinfer.models.folder import member, read_json
from models.stored import NAMES, TENSORS, configure, equal, load, shards, store

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FIRST = {name: TENSORS[name] for name in NAMES[:20]}
SECOND = {name: TENSORS[name] for name in NAMES[20:]}
WHERE = {**dict.fromkeys(FIRST, ONE), **dict.fromkeys(SECOND, TWO)}
OTHER: dict[str, Tensor] = {name: x + 1 for name, x in TENSORS.items()}
INDEX: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": WHERE}


@pytest.fixture
def want(tmp_path: Path) -> Any:
    return load(store(tmp_path / "single"))


def test_index(tmp_path: Path, want: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Shards with an index hold the same weights as one file; the files read are logged."""
    with caplog.at_level(logging.INFO):
        assert equal(load(shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND}, INDEX)), want)
    assert f"weights are read from {ONE}, {TWO}" in caplog.text


def test_index_wins(tmp_path: Path, want: Any) -> None:
    """Beside an index a stray model.safetensors with other values is not read."""
    files = {ONE: FIRST, TWO: SECOND, "model.safetensors": OTHER}
    assert equal(load(shards(tmp_path / "m", files, INDEX)), want)


def test_no_index(tmp_path: Path, want: Any) -> None:
    """Shards without an index are all read."""
    assert equal(load(shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND})), want)


def test_duplicate(tmp_path: Path) -> None:
    """Without an index a tensor in two shards is an error that names it and both files."""
    name = NAMES[0]
    with pytest.raises(CheckpointError, match=f"{name} is in both {ONE} and {TWO}"):
        load(shards(tmp_path / "m", {ONE: FIRST, TWO: {**SECOND, name: TENSORS[name]}}))


def test_incomplete_set(tmp_path: Path) -> None:
    """Shards of one set of which some are missing, or of two sets, are an error that says which."""
    with pytest.raises(CheckpointError, match=r"of 2 shards these are missing .*\[2\]"):
        load(shards(tmp_path / "a", {ONE: TENSORS}))
    with pytest.raises(CheckpointError, match="more than one set"):
        load(shards(tmp_path / "b", {ONE: FIRST, TWO: SECOND, "model-00001-of-00003.safetensors": OTHER}))


def test_old_copy(tmp_path: Path, want: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor that the index maps to shard 2 is read there, though shard 1 has an old copy, which is reported."""
    name = NAMES[-1]
    files = {ONE: {**FIRST, name: OTHER[name]}, TWO: SECOND}
    assert equal(load(shards(tmp_path / "m", files, INDEX)), want)
    assert f"not in the index, so not read: {name} in {ONE}" in caplog.text


def test_consolidated(tmp_path: Path, want: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Only the file of Hugging Face's name is read, not a consolidated.safetensors beside it."""
    folder = store(tmp_path / "m")
    save_file(OTHER, folder / "consolidated.safetensors")
    with caplog.at_level(logging.INFO):
        assert equal(load(folder), want)
    assert "weights are read from model.safetensors" in caplog.text


def test_no_weights(tmp_path: Path) -> None:
    """A folder without weights is an error that says what was looked for."""
    with pytest.raises(CheckpointError, match=r"holds no weights: no model\.safetensors\.index\.json"):
        load(configure(tmp_path / "m"))


def test_missing_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that the index names and that are not there are all listed, before any weight is read."""
    gone = ["model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    where = {**WHERE, NAMES[0]: gone[1], NAMES[1]: gone[0]}
    folder = shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND}, {"weight_map": where})
    monkeypatch.setattr(checkpoints, "safe_open", None)
    with pytest.raises(CheckpointError, match=rf"was the download complete\?\): {gone[0]}, {gone[1]}"):
        load(folder)


def test_not_in_its_shard(tmp_path: Path) -> None:
    """A tensor that is not in the shard that the index names is an error with both names."""
    with pytest.raises(CheckpointError, match=f"{NAMES[0]} is not in {TWO}"):
        load(shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND}, {"weight_map": {**WHERE, NAMES[0]: TWO}}))


def test_not_in_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor that is in a shard but not in the index counts as missing, and is reported."""
    where = {k: v for k, v in WHERE.items() if k != NAMES[0]}
    with pytest.raises(CheckpointError, match=f"missing: {NAMES[0]}$"):
        load(shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND}, {"weight_map": where}))
    assert f"{NAMES[0]} in {ONE}" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 3}}']
)
def test_bad_index(tmp_path: Path, text: str) -> None:
    """An index that is no JSON, or has no usable weight_map, is an error that names it; there is no falling back."""
    folder = store(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def cut(data: bytes) -> list[bytes]:
    """A file cut short at many places, and spoilt in its head."""
    head = 8 + int.from_bytes(data[:8], "little")
    short = [data[:n] for n in (0, 4, 8, 100, head - 1, head, head + 5, len(data) - 1)]
    return [*short, b"\xff" * 8 + data[8:], data[:9] + b"\0" + data[10:], data + b"\0", b"<html>not found</html>"]


@pytest.mark.parametrize("kind", range(12))
@pytest.mark.parametrize("indexed", [False, True])
def test_corrupt(tmp_path: Path, kind: int, indexed: bool) -> None:
    """A file cut short anywhere, with bytes too many or with a spoilt head is an error that names it."""
    folder = shards(tmp_path / "m", {ONE: FIRST, TWO: SECOND}, INDEX) if indexed else store(tmp_path / "m")
    file = folder / (TWO if indexed else "model.safetensors")
    data = file.read_bytes()
    assert len(cut(data)) == 12
    file.write_bytes(cut(data)[kind])
    with pytest.raises(CheckpointError, match=f"{file.name}: truncated, corrupt or unreadable"):
        load(folder)


def test_directory_as_file(tmp_path: Path) -> None:
    """A folder where a file should be is as good as a missing file."""
    (configure(tmp_path / "m") / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load(tmp_path / "m")


_WATCHED: list[str] = []
_ON: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _ON and isinstance(arguments[0], str | bytes):
        _WATCHED.append(os.fsdecode(arguments[0]))


_HOOKED: list[bool] = []


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every path opened inside: by Python (audit hook) and by safetensors, which Python does not see."""
    if not _HOOKED:
        sys.addaudithook(_hook)
        _HOOKED.append(True)
    real = checkpoints.safe_open

    def spy(path: str, **options: Any) -> Any:
        _WATCHED.append(path)
        return real(path, **options)

    monkeypatch.setattr(checkpoints, "safe_open", spy)
    _WATCHED.clear()
    _ON.append(True)
    try:
        yield _WATCHED
    finally:
        _ON.clear()


ESCAPES = (
    "../other/model.safetensors",
    "ABS",
    "sub/../../x.safetensors",
    "link.safetensors",
    "shard\0.safetensors",
    "a\\..\\b",
    "",
    ".",
    "..",
    "sub/x.safetensors",
)


@pytest.mark.parametrize("entry", ESCAPES)
def test_escapes(tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index entry that leads out of the folder is refused by name, and the outside file is never opened."""
    outside = store(tmp_path / "other") / "model.safetensors"
    (tmp_path / "x.safetensors").write_bytes(outside.read_bytes())
    name = str(outside) if entry == "ABS" else entry
    where = {**dict.fromkeys(NAMES, "model-00001-of-00001.safetensors"), NAMES[3]: name}
    folder = shards(tmp_path / "m", {"model-00001-of-00001.safetensors": TENSORS}, {"weight_map": where})
    (folder / "sub").mkdir()
    (folder / "link.safetensors").symlink_to(outside)
    with opened(monkeypatch) as paths, pytest.raises(CheckpointError) as e:
        load(folder)
    assert repr(name) in str(e.value)
    assert NAMES[3] in str(e.value)
    assert {Path(path).name for path in paths} == {"config.json", "model.safetensors.index.json"}
    assert {Path(path).parent for path in paths} == {folder}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_links_out(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file of the folder that is a link out of it is refused and never opened; the same rule for all readers."""
    folder = store(tmp_path / "m")
    outside = tmp_path / "other" / "target"
    outside.parent.mkdir()
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with opened(monkeypatch) as paths, pytest.raises(CheckpointError, match=f"'{name}' is a link that leaves"):
        load(folder)
    assert not [path for path in paths if "other" in path or path.endswith("/" + name)]
    with pytest.raises(CheckpointError, match="leaves"):
        read_json(folder, name)


def test_dead_link(tmp_path: Path) -> None:
    """A link to nothing, or to itself, is a missing file."""
    folder = store(tmp_path / "m")
    for target in ("nowhere", "model.safetensors"):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(target)
        assert member(folder, "model.safetensors") is None
    with pytest.raises(CheckpointError, match="holds no weights"):
        load(folder)


def test_links_inside(tmp_path: Path, want: Any) -> None:
    """A link to another file of the folder works, and so does a folder that is itself a link."""
    folder = store(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.bin")
    (folder / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "alias").symlink_to(folder)
    assert equal(load(tmp_path / "alias"), want)


def test_hub_cache(tmp_path: Path, want: Any) -> None:
    """The hub cache's layout, snapshots/REVISION/file -> blobs/HASH of the same model, is followed, another's not."""
    home = tmp_path / "models--a--b"
    folder = home / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(store(tmp_path / "plain").iterdir()):
        blob = home / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert equal(load(folder), want)
    for wrong in (tmp_path / "models--c--d" / "blobs", tmp_path / "blobs", home / "blobs" / "deep"):
        wrong.mkdir(parents=True, exist_ok=True)
        (wrong / "x").write_bytes(b"{}")
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(wrong / "x")
        with pytest.raises(CheckpointError, match="leaves the model folder"):
            load(folder)


def test_reader_reads_slices(tmp_path: Path) -> None:
    """A reader gives any part of any tensor on either axis."""
    checkpoint = checkpoints.open_checkpoint(store(tmp_path / "m"))
    stored = checkpoint.tensors["lm_head.weight"]
    assert (stored.shape, stored.dtype) == ((21, 16), "F32")
    with checkpoints.reader() as read:
        assert torch.equal(read(stored, (slice(3, 9),)), TENSORS["lm_head.weight"][3:9])
        assert torch.equal(read(stored, (slice(0, 21), slice(5, 6))), TENSORS["lm_head.weight"][:, 5:6])
