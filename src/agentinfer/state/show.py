"""States as tables for a notebook. Knows only how things look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from agentinfer.state.ids import BlockId, ints

if TYPE_CHECKING:
    from agentinfer.state.blocks import BlockPool
    from agentinfer.state.engine import EngineState
    from agentinfer.state.plan import Plan

_MOST = 24
"""Lines of a table that are shown; the rest is counted."""


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """An HTML table with a caption."""
    rows = [tuple(line) for line in lines]
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:right'>{escape(str(x))}</td>" for x in row) + "</tr>"
        for row in rows[:_MOST]
    )
    if len(rows) > _MOST:
        body += f"<tr><td colspan='{len(head)}'>and {len(rows) - _MOST} more</td></tr>"
    caption = f"<caption style='text-align:left;font-weight:bold'>{escape(title)}</caption>"
    return f"<table>{caption}<tr>{cells}</tr>{body}</table>"


def state_html(state: EngineState) -> str:
    """Who runs, who waits, and what is left."""
    cols = state.cols
    running = [
        (run.row, run.seq, cols.written[run.row], cols.computed[run.row], cols.known[run.row], cols.length[run.row],
         cols.limit[run.row], short(run.blocks))
        for row in ints(state.order)
        if (run := state.rows[row]) is not None
    ]  # fmt: skip
    waiting = [(w.seq, len(w.tokens), len(w.request.prompt)) for w in (*state.requeued, *state.waiting)]
    title = f"EngineState before step {state.step}: {len(running)} running, {len(waiting)} waiting"
    shown = table(title, ("row", "seq", "written", "computed", "known", "length", "limit", "blocks"), running)
    if waiting:
        shown += table("waiting", ("seq", "tokens", "of them prompt"), waiting)
    return shown + pool_html(state.pool)


def pool_html(pool: BlockPool) -> str:
    """How the blocks are shared out, a square a block."""
    squares: list[str] = []
    for block, refs in enumerate(ints(pool.refs[1 : _MOST * 16 + 1]), start=1):
        where, colour = _place(pool, BlockId(block), refs)
        squares.append(f"<span title='block {block}: {where}' style='color:{colour}'>&#9632;</span>")
    held = int((pool.refs > 0).sum())
    title = (
        f"BlockPool: {len(pool.free)} free, {len(pool.cached)} cached, {held} referenced, {len(pool.keys)} registered"
    )
    return f"<div><b>{escape(title)}</b><br>{''.join(squares)}</div>"


def _place(pool: BlockPool, block: BlockId, refs: int) -> tuple[str, str]:
    known = block in pool.keys
    if refs > 0:
        return f"{refs} references" + (", registered" if known else ""), "#1f6f43" if refs > 1 else "#4caf7a"
    return ("cached", "#d9a441") if known else ("free", "#cccccc")


def plan_html(plan: Plan) -> str:
    """What one step computes, a line a row."""
    sampled = set(ints(plan.sample_rows))
    lines = [
        (row, seq, f"[{first}, {last})", "yes" if i in sampled else "no")
        for i, (row, seq, first, last) in enumerate(
            zip(ints(plan.rows), ints(plan.seqs), ints(plan.start), ints(plan.context), strict=True)
        )
    ]
    title = f"Plan of step {plan.step}: {len(plan.slots)} positions, {len(plan.samples)} samples"
    extra = [f"copies {list(plan.copies)}"] if plan.copies else []
    extra += [f"preempted {list(plan.preempted)}"] if plan.preempted else []
    return table("; ".join([title, *extra]), ("row", "seq", "positions", "samples"), lines)


def short(blocks: Sequence[int]) -> str:
    """A block table in few words."""
    shown = " ".join(str(block) for block in blocks[:8])
    return shown if len(blocks) <= 8 else f"{shown} .. {blocks[-1]} ({len(blocks)})"
