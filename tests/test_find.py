"""find_model: from a name to a folder, or to words about where it was looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentinfer
from agentinfer.errors import AgentInferError, CheckpointError
from agentinfer.find import find_model
from tiny import write_tiny


def test_a_folder_is_itself(tmp_path: Path) -> None:
    """A folder is found where it is, by path or by its name as text."""
    assert find_model(tmp_path) == find_model(str(tmp_path)) == tmp_path


def test_a_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_model("~/model") == tmp_path / "model"


def test_the_demo_model_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model is that of the user's cache, and what is said about it comes to *progress*."""
    said: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ensure(cache: Path, progress: object) -> Path:
        progress("converting")
        return cache / "there"

    monkeypatch.setattr("agentinfer.find.ensure_demo", ensure)
    assert find_model("demo", progress=said.append) == tmp_path / "agentinfer" / "there"
    assert said == ["converting"]


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_id_is_its_snapshot(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id of the hub becomes the folder that its client gives; weights are asked for unless they are not wanted."""
    asked: list[list[str]] = []

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        assert repo_id == "some/model"
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_model("some/model", weights=weights) == tmp_path
    assert ("model*.safetensors" in asked[0]) is weights


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "is empty"), (__file__, "is a file"), ("/no/such", "no such folder"), ("./nothing", "no such folder")],
)
def test_what_is_nowhere_is_refused(name: str, words: str) -> None:
    """What is no folder and can be no id of the hub is refused in words, and the hub is not asked."""
    with pytest.raises(AgentInferError, match=words):
        find_model(name)


def test_an_engine_of_no_folder_names_find_model(tmp_path: Path) -> None:
    """open_engine takes folders; a name that is none is refused with what would find it, and the two fit together."""
    with pytest.raises(CheckpointError, match="some/model: no such folder; find_model gives"):
        agentinfer.open_engine("some/model")
    folder = write_tiny(tmp_path / "model")
    engine = agentinfer.open_engine(agentinfer.find_model(folder), agentinfer.Settings(num_blocks=64))
    assert repr(engine) == "<Engine of Qwen3ForCausalLM: 0 waiting, 0 running, step 0>"
