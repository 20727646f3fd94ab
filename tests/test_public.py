"""The names that `agentinfer` offers."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

import agentinfer
import sources

INIT = sources.SRC / "agentinfer" / "__init__.py"


def declared() -> dict[str, str]:
    """The module of each name that a type checker sees."""
    guard = next(node for node in sources.tree(INIT).body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module).removeprefix("agentinfer.") for node in imports for alias in node.names}


@pytest.mark.parametrize("name", agentinfer.__all__)
def test_every_listed_name_resolves(name: str) -> None:
    """Each public name is something, and the same thing each time."""
    assert getattr(agentinfer, name) is getattr(agentinfer, name)


def test_checkers_and_users_see_the_same() -> None:
    """The list, the lazy table and what a type checker reads name the same objects in the same modules."""
    lazy = {name: module for module, names in agentinfer._NAMES.items() for name in names.split()}
    assert lazy == declared()
    assert set(agentinfer.__all__) == {"__version__", *lazy}


def test_what_the_readers_of_the_contract_look_for() -> None:
    """The names that the documentation uses are public."""
    wanted = """SamplingParams Request Limits EngineState Plan Output schedule commit arrive abort fork rewind replay
        step digest violations reserve throughput Policy Turn Machine
        launch land prefill_step decode_step sample advance Engine
        generate stream open_engine Settings AgentInferError InvalidRequest InvalidSetting CheckpointError"""
    assert set(wanted.split()) <= set(agentinfer.__all__)
    assert dir(agentinfer) == sorted(agentinfer.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist says so as any module would."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = agentinfer.nonsense


def test_the_version_is_that_of_the_package() -> None:
    """`__version__` is what pyproject.toml says."""
    project = tomllib.loads((sources.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert agentinfer.__version__ == project["version"]


def test_the_control_plane_needs_no_torch() -> None:
    """Requests, states, policies, transitions and replay can be used through the package without importing torch."""
    code = f"""
import sys
sys.path.insert(0, {str(sources.SRC)!r})
from agentinfer import Limits, Policy, Request, SamplingParams, abort, arrive, commit, digest, fork, initial, replay
from agentinfer import reserve, rewind, schedule, step, throughput, violations
limits = Limits(block_size=4, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, vocab_size=100)
state, _ = arrive(initial(limits), Request((1, 2, 3), SamplingParams(max_tokens=2)))
state, plan = schedule(state, reserve)
assert plan is not None and violations(state) == []
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
