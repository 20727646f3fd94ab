"""Inputs: one step's plan as the device sees it. stage() makes it with one copy to the device.

Knows Plan, block tables and slots. R rows, T positions, S samples, C table columns. Row 0 and block 0 are the sinks of
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor

from agentinfer.errors import GraphBinding, StaleHandle
from agentinfer.ops.kv import Donated, KvCache, copy_blocks, holding
from agentinfer.state.ids import I32, I64, cdiv
from agentinfer.state.plan import Plan, TableEntries

T = TypeVar("T")


class Memo:
    """What follows from one step's Inputs alone and so is computed once a step, not once a layer. Mutable on purpose.

    It dies with its Inputs. Whoever writes new values into the tensors of an Inputs (a captured graph's static set)
    gives it a new Memo.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[object, tuple[object, Any]] = {}

    def once(self, key: object, owner: object, make: Callable[[], T]) -> T:
        """The value of *make*, from the first call with this *key* and the same object *owner*."""
        known = self._known.get(key)
        if known is None or known[0] is not owner:
            known = (owner, make())
            self._known[key] = known
        return known[1]


@frozen(eq=False)
class HostRows:
    """The lengths of the rows as Python ints, so that no layer must ask the device."""

    rows: tuple[int, ...]
    start: tuple[int, ...]
    """First position computed."""
    count: tuple[int, ...]
    """Positions computed."""
    context: tuple[int, ...]
    """Keys attended to by the row's last position, this step's included."""


@frozen(eq=False)
class Inputs:
    """All that a forward pass reads besides weights and KV, on the device. The positions of a row lie together, rows in
    order.
    """

    ids: Tensor
    """[T] int64 token ids."""
    positions: Tensor
    """[T] int64 position in its sequence."""
    slots: Tensor
    """[T] int64 KV slot: block * block_size + offset."""
    rows: Tensor
    """[R] int64 row of the tables; 0 for padding."""
    cu_seqlens_q: Tensor
    """[R + 1] int32: row i's positions are cu_seqlens_q[i] : cu_seqlens_q[i + 1]."""
    context: Tensor
    """[R] int32 keys, this step's included."""
    table: Tensor
    """[rows + 1, M] int32: the device's block table, of which step row i is `table[rows[i]]`. What lies past a row's
    context may be anything."""
    max_query: int
    """No row has a larger count."""
    max_context: int
    """No row has a larger context."""
    samples: Tensor
    """[S] int64 flat positions whose logits are wanted: those of the plan's samples, then those that it only judges."""
    last_rows: Tensor
    """[L] int64 the distinct rows that sample."""
    last_samples: Tensor
    """[L] int64 which of the S samples is the last one of each."""
    host: HostRows | None
    """None in a captured graph, whose lengths change from replay to replay."""
    memo: Memo = field(factory=Memo)


def host_rows(x: Inputs) -> HostRows:
    """The lengths of the rows of *x* as Python ints. Raises GraphBinding in a captured graph."""
    if x.host is None:
        raise GraphBinding("this op reads the lengths of the rows on the host, and a captured graph has none there")
    return x.host


def tables_of(x: Inputs, block_size: int) -> Tensor:
    """[R, C] int32: the block tables of the rows of *x*, as many columns as the longest context needs. Once a step."""
    return x.memo.once(
        ("tables", block_size),
        x.table,
        lambda: x.table[:, : cdiv(x.max_context, block_size)].index_select(0, x.rows),
    )


def check_tables(context: Sequence[int] | npt.NDArray[Any], columns: int, block_size: int) -> None:
    """Raises ValueError if a context is longer than a block table of *columns* entries can address."""
    longest = int(max(context, default=0)) if not isinstance(context, np.ndarray) else int(context.max(initial=0))
    if longest > columns * block_size:
        raise ValueError(
            f"a row attends to {longest} keys, its block table holds {columns} blocks of {block_size}: "
            f"{columns * block_size}"
        )


def ranges(start: npt.NDArray[Any], count: npt.NDArray[Any]) -> I64:
    """start[0] .. start[0] + count[0] - 1, start[1] .., one after the other. [sum of count] int64."""
    ends = np.cumsum(count, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(start.astype(np.int64) - (ends - count), count)


def table_entries(tables: Sequence[TableEntries], columns: int) -> tuple[I64, I32]:
    """Flat places in the table and the blocks to put there; of two entries for one place the later."""
    if not tables:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    for row, first, blocks in tables:
        if first + len(blocks) > columns:
            raise ValueError(
                f"row {row} needs {first + len(blocks)} table entries, the block table has {columns} columns"
            )
    first = np.array([row * columns + at for row, at, _ in tables], np.int64)
    count = np.array([len(blocks) for _, _, blocks in tables], np.int64)
    where = ranges(first, count)
    block = np.array([b for _, _, blocks in tables for b in blocks], np.int32)
    if len(tables) > 1:
        unique, newest = np.unique(where[::-1], return_index=True)
        where, block = unique, block[::-1][newest]
    return where, block


def put(host: npt.NDArray[Any], device: torch.device) -> Tensor:
    """*host* on *device*, without waiting for the copy; on a CPU the same memory."""
    there = torch.from_numpy(host)
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)


def apply_entries(table: Tensor, where: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
    """table.flat[where] = blocks, in place."""
    there = put(np.stack((where, blocks)).astype(np.int64), table.device)
    table.view(-1).index_copy_(0, there[0], there[1].to(table.dtype))


def upload(
    wide: Sequence[npt.NDArray[Any]], narrow: Sequence[npt.NDArray[Any]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Put int64 columns *wide* and int32 columns *narrow* on *device* in one block, with one copy; views of it, in the
    same order, each at a multiple of 16 bytes: kernels are compiled for aligned vectors only.
    """
    columns = [(x, 2) for x in wide] + [(x, 1) for x in narrow]
    edges = np.cumsum([0, *(cdiv(len(x) * words, 4) * 4 for x, words in columns)])
    block = np.empty(int(edges[-1]), np.int32)
    spans = [(int(at), int(at) + len(x) * words) for at, (x, words) in zip(edges, columns, strict=False)]
    for (x, words), (at, end) in zip(columns, spans, strict=True):
        (block[at:end].view(np.int64) if words == 2 else block[at:end])[:] = x
    there = put(block, device)
    views = [there[at:end] for at, end in spans]
    return [view.view(torch.int64) for view in views[: len(wide)]], views[len(wide) :]


def stage(plan: Plan, kv: Donated[KvCache], last: Tensor) -> tuple[Inputs, KvCache]:
    """Put *plan* on the device of *kv*: apply its table entries, then its block copies, and make its Inputs. *Donates*
    kv.

    *last* is [rows + 1] integers on the device: the last sampled token of each row; inputs of -1 are taken from it.
    Raises, leaving *kv* as it was: StaleHandle if the plan extends other tables than those that the device holds,
    ValueError if a context exceeds the block table.
    """
    kv.check("stage")
    if plan.base not in (-1, kv.step):
        raise StaleHandle(
            f"step {plan.step} extends the block tables of step {plan.base}, the device holds those of step {kv.step}"
        )
    columns = kv.table.shape[1]
    check_tables(plan.context, columns, kv.block_size)
    where, block = table_entries(plan.tables, columns)
    kv = kv.consume("stage")
    waiting = np.flatnonzero(plan.inputs < 0)
    last_of_row = np.flatnonzero(np.diff(plan.sample_rows, append=-1) != 0)
    wide, narrow = upload(
        (
            plan.inputs,
            ranges(plan.start, plan.count),
            plan.slots,
            plan.rows,
            plan.samples if plan.scored is None else np.concatenate((plan.samples, plan.scored.samples)),
            plan.rows[plan.sample_rows[last_of_row]],
            last_of_row,
            where,
            waiting,
            np.repeat(plan.rows, plan.count)[waiting],
        ),
        (np.cumsum(np.append(0, plan.count), dtype=np.int32), plan.context, block),
        kv.table.device,
    )
    ids, positions, slots, rows, samples, last_rows, last_samples, at, late, late_rows = wide
    if len(where):
        kv.table.view(-1).index_copy_(0, at, narrow[2])
    if plan.copies:
        kv = copy_blocks(kv, plan.copies)
    if len(waiting):
        ids.index_copy_(0, late, last.index_select(0, late_rows).to(torch.int64))
    host = HostRows(
        tuple(plan.rows.tolist()), tuple(plan.start.tolist()), tuple(plan.count.tolist()), tuple(plan.context.tolist())
    )
    longest = max(host.context, default=0)
    inputs = Inputs(
        ids=ids,
        positions=positions,
        slots=slots,
        rows=rows,
        cu_seqlens_q=narrow[0],
        context=narrow[1],
        table=kv.table,
        max_query=max(host.count, default=0),
        max_context=longest,
        samples=samples,
        last_rows=last_rows,
        last_samples=last_samples,
        host=host,
    )
    return inputs, holding(kv, plan.step)


def remember(last: Donated[Tensor], x: Inputs, tokens_S: Tensor) -> Tensor:
    """Write each row's newest sampled token into *last* ([rows + 1] integers), for the next step's inputs of -1.
    *Donates* last.
    """
    return last.index_copy_(0, x.last_rows, tokens_S.index_select(0, x.last_samples).to(last.dtype))


def by_hand(
    kv: Donated[KvCache],
    tokens: Sequence[Sequence[int]],
    start: Sequence[int],
    blocks: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
    *,
    every: bool = False,
) -> tuple[Inputs, KvCache]:
    """Inputs without a plan: row i computes *tokens[i]* from position *start[i]* on, over *blocks[i]* (its whole
    table). *Donates* kv.

    For warm-up, profiling and scoring. Rows are 1, 2, .. unless given. Samples each row's last position, or *every*
    one.
    """
    count = np.array([len(x) for x in tokens], np.int32)
    first = np.array(start, np.int32)
    places = np.arange(1, len(tokens) + 1, dtype=np.int32) if rows is None else np.array(rows, np.int32)
    flat = np.repeat(np.arange(len(tokens), dtype=np.int32), count)
    positions = ranges(first, count)
    owned = [np.array(x, np.int64) for x in blocks]
    size = kv.block_size
    held = [
        owned[row][at // size] * size + at % size for row, at in zip(flat.tolist(), positions.tolist(), strict=True)
    ]
    ends = (np.cumsum(count) - 1)[count > 0]
    samples = np.arange(len(flat)) if every else ends
    plan = Plan(
        step=kv.step + 1,
        base=-1,
        rows=places,
        seqs=places,
        start=first,
        count=count,
        context=first + count,
        slots=np.array(held, np.int64),
        inputs=np.array([t for row in tokens for t in row], np.int32),
        samples=samples.astype(np.int32),
        sample_rows=flat[samples],
        sampling=None,  # pyright: ignore[reportArgumentType] - a forward pass does not read it
        tables=tuple((int(row), 0, tuple(x)) for row, x in zip(places, blocks, strict=True)),  # pyright: ignore[reportArgumentType]
        copies=(),
        preempted=(),
    )
    return stage(plan, kv, torch.zeros(1, dtype=torch.int64, device=kv.table.device))
