"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any import."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


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
