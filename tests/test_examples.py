"""The scripts of examples/ run, on a tiny model, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sources
import toys
from tiny import write_tiny

SAYS = {
    "speculative_draft.py": r"tokens in \d+ steps, (\d+) of \1 guesses right",
    "speculative_ngram.py": "(?s)plain:.*ngram:.*the same tokens",
}


def test_every_example_is_tested() -> None:
    """None is left out."""
    assert sorted(path.name for path in (sources.ROOT / "examples").glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """It ends well, with nothing on standard error."""
    folder = toys.folder_of(write_tiny(tmp_path, vocab_size=280), toys.byte_level())
    command = [sys.executable, str(sources.ROOT / "examples" / name), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(SAYS[name], done.stdout), done.stdout
