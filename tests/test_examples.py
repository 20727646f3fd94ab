"""The scripts of examples/ run, on a tiny model, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sources
import toys
from agentinfer.build import Settings
from agentinfer.loop import generate, open_engine
from agentinfer.state.request import SamplingParams
from tiny import write_tiny

SAYS = {
    "speculative_draft.py": r"tokens in \d+ steps, (\d+) of \1 guesses right",
    "speculative_ngram.py": "(?s)plain:.*ngram:.*the same tokens",
}


RANKS = ("ranks_weights.py",)
"""Started by torchrun."""

CLIENTS = ("langchain_chat.py", "locust_load.py", "openai_client.py")
"""They talk to a server, with packages that are not ours."""


def test_every_example_is_known() -> None:
    """Each is run here, or is a client's, which at least compiles."""
    found = {path.name: path for path in (sources.ROOT / "examples").glob("*.py")}
    assert sorted(found) == sorted((*SAYS, *RANKS, *CLIENTS))
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


@pytest.mark.parametrize("name", RANKS)
def test_an_example_of_several_ranks_runs(name: str, tmp_path: Path) -> None:
    """Two ranks go on with the weights that each of them gave: as one rank does with those."""
    folder = write_tiny(tmp_path / "old")
    new = write_tiny(tmp_path / "new", lambda tensors: tensors["lm_head.weight"].neg_())
    torchrun = "from torch.distributed.run import main; main()"
    command = [sys.executable, "-c", torchrun, "--nproc-per-node", "2", str(sources.ROOT / "examples" / name)]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings = Settings(num_blocks=64, max_num_seqs=4, max_model_len=64)
    each = [generate(open_engine(one, settings), [[1, 2, 3], [4, 5, 6, 7]], params) for one in (folder, new)]
    want = [f"version {i}: {result.output_ids}" for pair in zip(*each, strict=True) for i, result in enumerate(pair)]
    assert done.stdout.splitlines() == want
