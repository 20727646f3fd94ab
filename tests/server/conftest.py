"""What most of these tests ask: a tiny model, and a server of it. A module with another one has its own fixture."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from agentinfer.loop import open_engine
from serving import Server, running, small, write_talker


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One that all tests of a module ask."""
    with running(open_engine(folder, small())) as one:
        yield one
        one.quiet()
