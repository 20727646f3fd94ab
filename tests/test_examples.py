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


CLIENTS = ("langchain_chat.py", "locust_load.py", "openai_client.py")
"""They talk to a server, with packages that are not ours."""


def test_every_example_is_known() -> None:
    """Each is run here, or is a client's, which at least compiles."""
    found = {path.name: path for path in (sources.ROOT / "examples").glob("*.py")}
    assert sorted(found) == sorted((*SAYS, *CLIENTS))
    for name in CLIENTS:
        compile(found[name].read_text("utf-8"), name, "exec")


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """It ends well, with nothing on standard error."""
    folder = toys.folder_of(write_tiny(tmp_path, vocab_size=280), toys.byte_level())
    command = [sys.executable, str(sources.ROOT / "examples" / name), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(SAYS[name], done.stdout), done.stdout
