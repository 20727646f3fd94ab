"""Direct launches: the same as Triton's own, without its binder. The driver is a stand-in that writes calls down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sources
from agentinfer.ops.kernels import add_norm
from agentinfer.ops.kernels.launch import Direct

# Launches each kernel twice by Triton's own way and twice directly, with other numbers and other memory the second
# time. Prints what the compiled kernel was called with, pointers as numbers; then of odd cases which way they took.
CALLS = f"""
import json, sys
sys.path.insert(0, {str(sources.SRC)!r})
import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from agentinfer.ops.kernels import add_norm, launch

seen = []

class Launcher:
    def __init__(self, source, metadata):
        self.pdl = metadata.launch_pdl

    def __call__(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        places = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        seen.append([x, y, z, stream, function, list(metadata), self.pdl, enter is None, places])

class Loader:
    def load_binary(self, name, binary, shared, device):
        return 1, len(binary), 32, 0, 1024

    def get_device_properties(self, device):
        return {{"max_shared_mem": 232448}}

class Driver:
    launcher_cls, utils = Launcher, Loader()
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 77
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())

def ways():
    ordinary, direct = launch.Direct(add_norm._add_norm), launch.Direct(add_norm._add_norm)
    ordinary._able = False
    return ordinary, direct

def call(run, rows, *, shift=0, stride=None, pdl=True, eps=1e-6):
    x = torch.zeros(rows * 64 + 4)[shift : rows * 64 + shift].view(rows, 64)
    half = torch.zeros(2, rows, 64, dtype=torch.bfloat16)
    kept.append((x, half))
    tensors = (x, half, x, half[0, 0], half[0], half[0, 0])
    given = stride if stride is not None else half.stride(0)
    for each in run:
        each((rows, 1, 1), tensors, (eps, given), (64, 64, 2, False, True, pdl), warps=1, pdl=pdl)

kept = []
both = ways()
for rows in (1, 3, 16):
    call(both, rows)
    call(both, rows, pdl=False, eps=1e-5)
half = len(seen)
plain = [row[:7] + row[8:] for row in seen]
equal = plain[0::2] == plain[1::2]
known = len(both[1]._known)
direct = [row[7] for row in seen[1::2]]

def way(**odd):
    seen.clear()
    call(both[1:], 2, **odd)
    return seen[0][7]

facts = dict(equal=equal, known=known, direct=direct)
facts |= dict(fine=way(), odd=way(shift=1), aligned=way(shift=4), wide=way(stride=2**31))
knobs.runtime.launch_enter_hook.add(lambda *_: None)
facts["profiled"] = way()
print(json.dumps(facts))
"""


@pytest.mark.slow
def test_direct_launches_are_the_ordinary_ones(tmp_path: Path) -> None:
    """After the first launch of a kind the compiled kernel is called with what Triton calls it with, but for hooks;
    pointers that are not aligned and profiled launches go Triton's way.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    assert facts.pop("equal")
    assert facts == {
        "known": 2,
        "direct": [False, False, True, True, True, True],
        "fine": True,
        "odd": False,
        "aligned": True,
        "wide": True,  # this stand-in takes any integer: see the next test for one that does not
        "profiled": False,
    }


class Kernel:
    """What Direct needs of a Triton kernel: counts its ordinary launches, and takes 31 bits a number directly."""

    def __init__(self, *, special: bool) -> None:
        self.params = [type("P", (), {"do_not_specialize": not special})() for _ in range(3)]
        self.ordinary = self.direct = 0
        self.function = self.packed_metadata = None

    def __getitem__(self, grid: object):
        def launch(*args: object, **options: object) -> Kernel:
            self.ordinary += 1
            return self

        return launch

    def run(self, *args: object) -> None:
        if any(isinstance(x, int) and x >= 2**31 for x in args[10:]):
            raise OverflowError
        self.direct += 1


class Driver:
    """The least of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(
    monkeypatch: pytest.MonkeyPatch, numbers: list[float], *, special: bool = False, able: bool = True
) -> tuple[int, int]:
    """How many launches went Triton's way, and how many directly, one launch a number."""
    from agentinfer.ops.kernels import launch

    monkeypatch.setattr(launch, "driver", type("D", (), {"active": Driver()}))
    kernel = Kernel(special=special)
    run = Direct(kernel)
    run._able = able
    tensor = torch.zeros(16)
    for number in numbers:
        run((1, 1, 1), (tensor,), (number, 0.5), (), warps=1)
    return kernel.ordinary, kernel.direct


def test_integers_that_triton_would_specialize_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled for the value of an integer serves no other, so all its launches are ordinary."""
    assert launches(monkeypatch, [5, 5, 16], special=True) == (3, 0)
    assert launches(monkeypatch, [5, 5, 16]) == (1, 2)


def test_another_type_of_number_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer and a floating-point number at one place were compiled apart."""
    assert launches(monkeypatch, [5, 5.0, 6, 6.0]) == (2, 2)


def test_an_integer_of_more_bits_goes_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiled kernel refuses for its size is launched by Triton, which compiles for it."""
    assert launches(monkeypatch, [5, 2**31, 6]) == (2, 1)


def test_other_versions_and_the_interpreter_launch_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where direct launches were not verified there are none."""
    assert launches(monkeypatch, [5, 6], able=False) == (2, 0)
    assert not add_norm._run._able  # here Triton interprets
