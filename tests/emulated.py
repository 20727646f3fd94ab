"""The persistent kernel on a CPU: compiled by the host's C++ compiler with the threads of tests/emulation."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentinfer

COMPILERS = [path for path in (shutil.which("g++") or shutil.which("c++"),) if path]
"""The host's compiler of C++, if there is one."""
NVCC = [path for path in (shutil.which("nvcc"),) if path]
"""The compiler of CUDA, if there is one."""
SOURCES = Path(agentinfer.__file__).parent / "ops" / "kernels" / "persistent"
EMULATION = Path(__file__).parent / "emulation"


def build(compiler: str, folder: Path, values: Mapping[str, int]) -> Any:
    """The library of the kernel for the macros *values*, in *folder*."""
    target = folder / ("_".join(map(str, values.values())) + ".so")
    if not target.exists():
        subprocess.run(
            [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{EMULATION}", f"-I{SOURCES}",
             *(f"-D{name}={value}" for name, value in values.items()), EMULATION / "persistent.cpp", "-o", target],
            check=True,
        )  # fmt: skip
    library = ctypes.CDLL(str(target))
    library.run.restype = ctypes.c_char_p
    library.run.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64)
    return library


def run(library: Any, params: Any, seed: int = 0, most: int = 2_000_000) -> None:
    """One launch with threads drawn from *seed*, for *most* passes over the grid. Raises RuntimeError."""
    assert library.num_bytes() == ctypes.sizeof(params)
    problem = library.run(ctypes.addressof(params), seed, most)
    if problem is not None:
        raise RuntimeError(problem.decode())
