"""What lies between two captured steps, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from agentinfer.ops.kernels.step import begin, hand_over


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_begin_fills_tables_and_takes_last_tokens(rows: int) -> None:
    """Entries land at their places, inputs of -1 become the last token of their row, others stay."""
    table = torch.zeros((rows + 1, 4), dtype=torch.int32)
    entries = torch.zeros((2, rows + 8), dtype=torch.int32)
    entries[:, 0], entries[:, 1] = torch.tensor([5, 77]), torch.tensor([4 * rows + 3, 78])
    last = torch.arange(rows + 1) + 1000
    order = torch.randperm(rows) + 1
    inputs = torch.where(torch.arange(rows) % 3 == 0, 7, -1).to(torch.int32)
    ids = torch.zeros(rows, dtype=torch.int64)
    begin(entries, table, inputs, order, last, ids)
    want = torch.zeros_like(table)
    want.view(-1)[5], want.view(-1)[4 * rows + 3] = 77, 78
    assert torch.equal(table, want)
    assert ids.tolist() == [7 if i % 3 == 0 else 1000 + int(order[i]) for i in range(rows)]


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_hand_over_puts_choices_in_the_order_of_the_plan(rows: int) -> None:
    """Each row remembers its token, and what was chosen comes in the plan's order."""
    sampled = torch.stack((torch.arange(rows) + 50, torch.arange(rows) % 2))
    order, places = torch.randperm(rows) + 1, torch.randperm(rows)
    last, chosen = torch.full((rows + 1,), -5), torch.full((2, rows), -5)
    hand_over(sampled, order, places.to(torch.int32), last, chosen)
    assert int(last[0]) == -5
    assert torch.equal(last[order], sampled[0])
    assert torch.equal(chosen[:, places], sampled)
