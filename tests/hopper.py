"""Kernels compiled for Hopper, on a machine without one, in a process of their own: there Triton is no interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sources

MOST_SHARED = 227 << 10
"""Bytes of shared memory that a program on Hopper can have."""
HEAD = f"""
import json, re, sys
sys.path[:0] = {[str(sources.SRC), str(Path(__file__).parent)]!r}
from hopper import compiled_for_hopper, spilled
"""
"""What each script begins with; it prints a line of JSON for each kernel."""


def lines(script: str, cache: Path, timeout_s: float) -> list[Any]:
    """What *script* prints in a process that compiles into the folder *cache*."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=environment, capture_output=True, text=True, check=False,
        timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """*kernel* compiled, all of whose pointers are multiples of 16. Of *types* and *constants* it takes what it has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {x: constants[x] for x in kernel.arg_names if x in constants}
    places = {x: "constexpr" if x in fixed else types[x] for x in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(places.values()) if x.startswith("*")}
    return triton.compile(ASTSource(kernel, places, fixed, aligned), target=GPUTarget("cuda", 90, 32), options=options)


def spilled(ptx: str) -> int:
    """Bytes of registers that ptxas spills."""
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])
