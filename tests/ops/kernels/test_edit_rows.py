"""Bias and penalties in one pass, in Triton's interpreter, against ops/edit.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sources
from agentinfer.ops import edit
from agentinfer.ops.kernels import edit as kernel


@pytest.mark.parametrize(("vocab", "stride"), [(1, 1), (50, 50), (4096, 4096), (5000, 5008)])
def test_edited_rows_are_those_of_the_reference(vocab: int, stride: int) -> None:
    """Some rows, in any order, with bias, penalties, both or neither; tiles that the vocabulary does not fill."""
    draw = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, stride, generator=draw) * 4)[:, :vocab]
    bias = torch.randn(3, vocab, generator=draw)
    bias[1, ::2] = float("-inf")
    counts = torch.randint(0, 9, (4, vocab), generator=draw, dtype=torch.int32)
    penalties = torch.tensor([[0, 0, 1], [0.5, 0.25, 2.0], [-1.5, 0.75, 0.7], [2, -2, 1.3]])
    tables = edit.EditTables(bias, counts, penalties)
    places = torch.tensor([[4, 0, 2, 1, 3], [-1, 1, 2, -1, 0], [3, 1, -1, -1, 2]], dtype=torch.int32)
    before = logits.clone()
    got = kernel.edit_rows(logits, places, tables)
    want = edit.edit_rows(logits, places, tables)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3], logits[1])
    assert torch.equal(logits, before)
    assert torch.equal(torch.isinf(got), torch.isinf(want))


def test_no_rows_and_no_tables() -> None:
    """A copy where nobody asked for anything; nothing at all of no samples."""
    logits = torch.randn(2, 30)
    tables = edit.no_tables(30, torch.device("cpu"))
    places = torch.tensor([[1], [-1], [-1]], dtype=torch.int32)
    assert torch.equal(kernel.edit_rows(logits, places, tables), logits[1:])
    assert kernel.edit_rows(logits, places[:, :0], tables).shape == (0, 30)


COMPILE = f"""
import sys
sys.path.insert(0, {str(sources.SRC)!r})
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from agentinfer.ops.kernels import edit
types = dict(logits="*fp32", places="*i32", bias="*fp32", counts="*i32", penalties="*fp32", out="*fp32",
             num_samples="i32")
constants = dict(STRIDE=151936, V=151936, BV=edit.TILE)
places = {{x: "constexpr" if x in constants else types[x] for x in edit._edit.arg_names}}
aligned = {{(i,): [["tt.divisibility", 16]] for i, x in enumerate(places.values()) if x.startswith("*")}}
done = triton.compile(ASTSource(edit._edit, places, constants, aligned), target=GPUTarget("cuda", 90, 32),
                      options=dict(num_warps=8))
print(done.metadata.shared, done.asm["ptx"].count("ld.global.v4"), done.asm["ptx"].count("st.global.v4"))
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """Without shared memory, and with loads and stores of 16 bytes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shared, loads, stores = map(int, done.stdout.split())
    assert shared == 0
    assert loads >= 12
    assert stores >= 4
