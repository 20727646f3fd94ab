"""Counting what torch.compile compiles.

torch._dynamo imports Triton, and Triton's interpreter (tests/ops/kernels) must be chosen before that: so it is imported
when a test runs, not when tests are collected.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

COMPILERS = [pytest.param("inductor", marks=pytest.mark.slow)] if shutil.which("c++") or shutil.which("g++") else []
"""The compiler that production uses, where this machine has one for C++."""


def counting(backend: str) -> Any:
    """A backend for torch.compile that counts its calls in `frame_count`."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)
