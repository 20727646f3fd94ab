"""Edited rows and what they chose, a pass each, in Triton's interpreter, against ops/edit.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import draws
import hopper
from agentinfer.ops import edit
from agentinfer.ops.kernels import edit as kernel


@pytest.mark.parametrize(("vocab", "stride"), [(1, 1), (50, 50), (4096, 4096), (5000, 5008)])
def test_edited_rows_are_those_of_the_reference(vocab: int, stride: int) -> None:
    """Some rows, in any order, with bias, penalties, bans, all or none; tiles that the vocabulary does not fill."""
    draw = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, stride, generator=draw) * 4)[:, :vocab]
    bias = torch.randn(3, vocab, generator=draw)
    bias[1, ::2] = float("-inf")
    counts = torch.randint(0, 9, (4, vocab), generator=draw, dtype=torch.int32)
    penalties = torch.tensor([[0, 0, 1], [0.5, 0.25, 2.0], [-1.5, 0.75, 0.7], [2, -2, 1.3]])
    tables = edit.EditTables(bias, counts, penalties)
    bans = [[], [vocab - 1], [], [], [0, vocab // 2, vocab - 1]]
    x = draws.edit_inputs([4, 0, 2, 1, 3], [-1, 1, 2, -1, 0], [3, 1, -1, -1, 2], bans)
    before = logits.clone()
    got = kernel.edit_rows(logits, x, tables)
    want = edit.edit_rows(logits, x, tables)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3], logits[1])
    assert torch.equal(logits, before)
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    assert bool(torch.isinf(got[4, bans[4]]).all())


def test_no_rows_and_no_tables() -> None:
    """A copy where nobody asked for anything; nothing at all of no samples."""
    logits = torch.randn(2, 30)
    tables = edit.no_tables(30, torch.device("cpu"))
    none = edit.EditInputs((), *(torch.zeros(shape, dtype=torch.int32) for shape in ((7, 0), (0,), (0, 8), (0,))))
    assert torch.equal(kernel.edit_rows(logits, draws.edit_inputs([1], [-1], [-1]), tables), logits[1:])
    assert kernel.edit_rows(logits, none, tables).shape == (0, 30)


@pytest.mark.parametrize("count", [1, 4, 300])
def test_entered_tokens_are_those_of_the_reference(count: int) -> None:
    """Into what was chosen, by numbers of the plan, into last tokens, by rows, and into counts of rows with penalties;
    what belongs to others stays.
    """
    draw = torch.Generator().manual_seed(count)
    samples, rows = (torch.randperm(count + 9, generator=draw)[:count].tolist() for _ in range(2))
    penalised = [row if row % 3 else -1 for row in rows]
    x = draws.edit_inputs([0] * count, [-1] * count, penalised, samples=sorted(samples), rows=rows)
    found = torch.randint(0, 50, (2, count), generator=draw)
    ends: list[tuple[torch.Tensor, ...]] = []
    for enter in (kernel.enter_rows, edit.enter_rows):
        chosen, last = torch.full((2, count + 12), -7), torch.full((count + 9,), -7)
        tables = edit.EditTables(torch.empty(0, 50), torch.ones((count + 9, 50), dtype=torch.int32), torch.empty(0, 3))
        enter(found, x, chosen, last, tables)
        ends.append((chosen, last, tables.counts))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert int((ends[0][2] - 1).sum()) == 2 * sum(row >= 0 for row in penalised)


def test_each_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows ask for."""
    launched: list[str] = []
    for name in ("_run_edit", "_run_enter"):
        monkeypatch.setattr(kernel, name, lambda *_given, name=name, **_more: launched.append(name))
    x, tables = draws.edit_inputs([0, 1], [1, -1], [-1, 1], [[3], [4, 5]]), edit.no_tables(30, torch.device("cpu"))
    kernel.edit_rows(torch.zeros(2, 30), x, tables)
    kernel.enter_rows(torch.zeros(2, 2), x, torch.zeros(2, 2), torch.zeros(3), tables)
    assert launched == ["_run_edit", "_run_enter"]


COMPILE = """
from agentinfer.ops.kernels import edit
types = dict(logits="*fp32", places="*i32", bans="*i32", bias="*fp32", counts="*i32", penalties="*fp32", out="*fp32",
             num_samples="i32", width="i32", found="*i64", chosen="*i64", last="*i64")
constants = dict(STRIDE=151936, V=151936, BV=edit.TILE, TILE=edit.ENTERED)
for kernel, warps in ((edit._edit, 8), (edit._enter, 4)):
    done = compiled_for_hopper(kernel, types, constants, num_warps=warps)
    ptx = done.asm["ptx"]
    print(json.dumps([done.metadata.shared, ptx.count("ld.global.v4"), ptx.count("st.global.v4")]))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Rows of logits without shared memory, with loads and stores of 16 bytes."""
    (shared, loads, stores), _entered = hopper.lines(COMPILE, tmp_path, 300)
    assert shared == 0
    assert loads >= 12
    assert stores >= 4
