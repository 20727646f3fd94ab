"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any import."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" and "agentinfer.ops.kernels.launch" in sys.modules:
    raise pytest.UsageError("kernels were imported before the interpreter is chosen: import them when a test runs")
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def eight_bits_are_rounded() -> Any:
    """Triton 3.6 rounds to 8 bits without carrying into the exponent, and makes other numbers of them in bfloat16."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
        tl.float32: torch.float32,
    }  # fmt: skip
    plain = interpreter._convert_float

    def convert(x: Any, src: Any, dst: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (src, dst):
            return plain(x, src, dst, rounding)
        bits = torch.from_numpy(np.ascontiguousarray(x).view(f"int{src.primitive_bitwidth}")).view(kinds[src])
        made = bits.to(torch.float32).to(kinds[dst]).view(getattr(torch, f"int{dst.primitive_bitwidth}"))
        return made.numpy().view(f"uint{dst.primitive_bitwidth}").reshape(x.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(autouse=True, scope="session")
def scalars_are_integers() -> Any:
    """Bounds of loops are arrays of one number, of which numpy >= 2.4 makes no int as Triton 3.6 does."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        plain = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            plain(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield
