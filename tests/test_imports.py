"""Every module imports alone, on a machine with no GPU, no network and no environment."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

import sources

ALONE = ("agentinfer", "agentinfer.errors", "agentinfer.state", "agentinfer.testing")
LIGHT = tuple(name for name in sources.MODULES if name in ALONE or name.startswith(tuple(x + "." for x in ALONE[1:])))
HEAVY = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub")

NO_NETWORK = f"""
import socket, sys
sys.path.insert(0, {str(sources.SRC)!r})
def refuse(*_, **__):
    raise RuntimeError("an import used the network")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.create_connection = refuse
"""

LIGHT_IMPORT = """
import importlib
importlib.import_module(sys.argv[1])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""

# torch is imported once; each module is then imported in a process that forked from there.
HEAVY_IMPORT = """
import importlib, json, os, traceback
import torch
results = {}
for name in sys.argv[1:]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            importlib.import_module(name)
            problem = "it initialised CUDA" if torch.cuda.is_initialized() else ""
        except BaseException:
            problem = traceback.format_exc()
        with open(write, "w") as out:
            out.write(problem)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        results[name] = pipe.read()
    os.waitpid(child, 0)
print(json.dumps(results))
"""


def python(code: str, *arguments: str) -> str:
    """What *code* prints in a new Python with an empty environment."""
    command = [sys.executable, "-I", "-c", NO_NETWORK + code, *arguments]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def problems() -> dict[str, str]:
    """What went wrong in importing each module, if anything did."""
    return json.loads(python(HEAVY_IMPORT, *sources.MODULES))


@pytest.mark.parametrize("name", LIGHT)
def test_the_control_plane_imports_without_torch(name: str) -> None:
    """The package itself, its errors, its state and its testing import no torch, and nothing as heavy."""
    loaded = set(python(LIGHT_IMPORT, name).split())
    assert "agentinfer" in loaded
    assert not loaded & set(HEAVY)


def test_the_package_imports_nothing_but_itself() -> None:
    """`import agentinfer` loads no package but the standard library's."""
    loaded = set(python(LIGHT_IMPORT, "agentinfer").split())
    assert not loaded & {*HEAVY, "numpy", "attrs", "attr", "rpds"}


@pytest.mark.parametrize("name", sources.MODULES)
def test_every_module_imports_alone(name: str) -> None:
    """Any module can be the first to be imported, and none touches a GPU, the network or the environment for it."""
    assert problems()[name] == ""
