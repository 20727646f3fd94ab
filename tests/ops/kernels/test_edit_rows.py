"""Bias and penalties in one pass, in Triton's interpreter, against ops/edit.py."""

from __future__ import annotations

import pytest
import torch

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
