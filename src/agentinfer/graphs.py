"""Decode steps as CUDA graphs: captured once a bucket of rows, replayed for every plan of one query a row.

A captured graph is a closure over addresses. Its record says which: `Captured.bound`; a device with others raises
GraphBinding. Per step the host sends one block of numbers; all else is on the device.

Shapes: R rows of the bucket, D table entries that a step can bring in its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import GraphBinding, InvalidSetting, StaleHandle
from agentinfer.judging import basis_of
from agentinfer.ops.inputs import Inputs, Memo, apply_entries, check_tables, table_entries
from agentinfer.ops.kv import Donated, KvCache, copy_blocks, holding
from agentinfer.ops.sample import idle, needs_filters, words
from agentinfer.sampling import edited
from agentinfer.state.ids import I32, ints
from agentinfer.state.plan import Plan
from agentinfer.steps import Device, Flight, Machine, choose_rest, decode_step, in_parts, take_off

PARAMS_WORDS = 8
LEAD = 4
"""Words of a block that nothing is in: a compiler makes a case of its own of tensors where their memory begins."""


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Rows of the graphs for up to *most* rows: 1, 2, 4, 8, then the multiples of 8 below *most*, and *most* itself."""
    if most < 1:
        raise InvalidSetting("max_num_seqs", f"must be at least 1, not {most}")
    return tuple(sorted({*(n for n in (1, 2, 4, 8, *range(16, most, 8)) if n <= most), most}))


def bucket_of(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of *sizes* (ascending) that holds *rows*; None: none does."""
    return next((size for size in sizes if rows <= size), None)


@frozen(eq=False)
class Block:
    """The numbers that a step sends, as views of one piece of memory: on the host to fill, on the device to read."""

    whole: Tensor
    """int32."""
    positions: Tensor
    """[R] int64."""
    slots: Tensor
    """[R] int64."""
    rows: Tensor
    """[R] int64."""
    context: Tensor
    """[R] int32."""
    inputs: Tensor
    """[R] int32; -1: the row's last token."""
    index: Tensor
    """[R] int32 output index."""
    places: Tensor
    """[R] int32: which row of the plan each is."""
    params: Tensor
    """[R, 8] int32."""
    entries: Tensor
    """[2, D] int32: places in the block table, blocks to put there; unused ones put 0 at place 0."""


def block_words(rows: int) -> int:
    """int32 words of a block for *rows*."""
    return LEAD + rows * (6 + 4 + PARAMS_WORDS) + 2 * num_entries(rows)


def num_entries(rows: int) -> int:
    """D: in steady decode a row gets at most one block a step; some more for blocks exchanged for their equals."""
    return rows + 8


def lay_out(whole: Tensor, rows: int) -> Block:
    """*whole* (int32, block_words(rows)) as a Block."""
    wide = whole[LEAD : LEAD + 6 * rows].view(torch.int64).view(3, rows)
    rest = whole[LEAD + 6 * rows :]
    at = (4 + PARAMS_WORDS) * rows
    return Block(
        whole, wide[0], wide[1], wide[2], rest[:rows], rest[rows : 2 * rows], rest[2 * rows : 3 * rows],
        rest[3 * rows : 4 * rows], rest[4 * rows : at].view(rows, PARAMS_WORDS), rest[at:].view(2, -1),
    )  # fmt: skip


def left_of(m: Machine, plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The samples that are chosen after a graph, as `edited` has them: those whose logits are edited, and with them
    those with filters, which then take their time once. Graphs of several ranks heed no filters at all.
    """
    now, late = edited(plan)
    if now or m.ranks.tp.size > 1:
        now = tuple(sorted({*now, *ints(needs_filters(plan.sampling, m.limits.vocab_size))}.difference(late)))
    return now, late


def fill(block: Block, plan: Plan, where: I32, blocks: I32, left: Sequence[int]) -> None:
    """Write *plan* (one position a row) into *block* (on the host), and the table entries. Rows left over are padding:
    row 0, position 0, one key, the sink's slot.

    Rows with most keys come first: attention begins with them, so that no long one is left when all others are done.
    The samples *left* for later are greedy here.
    """
    n = len(plan.rows)
    order = np.argsort(-plan.context, kind="stable")
    block.whole.zero_()
    for target, values in (
        (block.positions, plan.start), (block.slots, plan.slots), (block.rows, plan.rows), (block.inputs, plan.inputs),
        (block.index, plan.sampling.index), (block.params, words(idle(plan.sampling, left))),
    ):  # fmt: skip
        target.numpy()[:n] = values[order]
    places = block.places.numpy()
    places[:n], places[n:] = order, np.arange(n, len(places))
    context = block.context.numpy()
    context[:n], context[n:] = plan.context[order], 1
    entries = block.entries.numpy()
    entries[0, : len(where)], entries[1, : len(blocks)] = where, blocks


@frozen(eq=False)
class Captured:
    """One graph and the memory that is its own."""

    graph: torch.cuda.CUDAGraph
    block: Block
    """On the device: what a step sends."""
    logits_RV: Tensor
    chosen: Tensor
    """[2, R] int64: tokens, ok, in the order of the plan's rows."""
    bound: tuple[int, ...]
    """Addresses of the KV, the block table and the last tokens that it was captured over."""
    kept: tuple[Tensor, ...]
    """All else that it reads and writes and that is not from its pool: freed, it would be somebody else's."""


def bindings(device: Device) -> tuple[int, ...]:
    """The addresses of all that a step reads and writes of *device*."""
    planes = (plane for layer in device.kv.layers for plane in (layer.k, layer.v) if plane is not None)
    return (device.last.data_ptr(), device.kv.table.data_ptr(), *(plane.data_ptr() for plane in planes))


def counts_of(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0 to *rows* as int32, and to *rows* - 1 as int64: where the queries of one a row begin, and which they are."""
    each = torch.arange(-LEAD, rows + 1, dtype=torch.int32, device=device)[LEAD:]
    return each, torch.arange(rows, device=device)


def inputs_of(block: Block, table: Tensor, ids: Tensor, counts: tuple[Tensor, Tensor], max_context: int) -> Inputs:
    """Inputs whose values are those of *block* at each replay. *counts*: of `counts_of`."""
    each, order = counts
    return Inputs(
        ids=ids,
        positions=block.positions,
        slots=block.slots,
        rows=block.rows,
        cu_seqlens_q=each,
        context=block.context,
        table=table,
        max_query=1,
        max_context=max_context,
        samples=order,
        last_rows=block.rows,
        last_samples=order,
        host=None,
        memo=Memo(),
    )


def capture(
    m: Machine, device: Donated[Device], sizes: Sequence[int], pool: Any = None
) -> tuple[dict[int, Captured], Device]:
    """A graph of the decode step, sampling included, for each of *sizes* rows. *Donates* device.

    They share a *pool* (torch.cuda.graph_pool_handle()) of memory for intermediates; the largest is captured first.
    Raises InvalidSetting if these ops can not be captured.
    """
    if m.ops.sample_rows is None or (m.ranks.tp.size > 1 and m.ops.part_rows is None):
        raise InvalidSetting("ops", f"{m.ops.name}: these ops wait for the host, so no graph can be made of them")
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graphs: dict[int, Captured] = {}
    for size in sorted(sizes, reverse=True):
        graphs[size], device = _capture(m, device, size, pool)
    torch.cuda.synchronize(m.ranks.device)
    return graphs, device


def _capture(m: Machine, device: Donated[Device], size: int, pool: Any) -> tuple[Captured, Device]:
    where = m.ranks.device
    host = torch.zeros(block_words(size), dtype=torch.int32)
    lay_out(host, size).context.fill_(1)
    block = lay_out(host.to(where), size)
    ids = torch.zeros(size, dtype=torch.int64, device=where)
    chosen = torch.zeros((2, size), dtype=torch.int64, device=where)
    counts = counts_of(size, where)
    graph = torch.cuda.CUDAGraph()
    side, here = torch.cuda.Stream(where), torch.cuda.current_stream(where)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        _, device = _step(m, device, block, ids, counts, chosen)  # compiles kernels, chooses cuBLAS algorithms
        side.synchronize()
        graph.capture_begin(pool=pool)  # not torch.cuda.graph(), which collects garbage each time
        try:
            logits_RV, device = _step(m, device, block, ids, counts, chosen)
        finally:
            graph.capture_end()
    here.wait_stream(side)
    return Captured(graph, block, logits_RV, chosen, bindings(device), (ids, *counts)), device


def _step(
    m: Machine, device: Donated[Device], block: Block, ids: Tensor, counts: tuple[Tensor, Tensor], chosen: Tensor
) -> tuple[Tensor, Device]:
    """What a graph holds: table entries and inputs, forward, sampling, last tokens. Logits (of several ranks this one's
    part), device.
    """
    from agentinfer.ops.kernels.step import begin, hand_over

    kv, last = device.kv, device.last
    begin(block.entries, kv.table, block.inputs, block.rows, last, ids)
    x = inputs_of(block, kv.table, ids, counts, m.limits.max_model_len)
    tp, sampled = m.ranks.tp, torch.empty_like(chosen)
    logits_RV, kv = decode_step(in_parts(m) if tp.size > 1 else m, kv, x)
    if tp.size > 1 and m.ops.part_rows is not None:
        m.ops.part_rows(logits_RV, block.params, block.index, tp, m.limits.vocab_size, sampled[0], sampled[1])
    elif m.ops.sample_rows is not None:
        m.ops.sample_rows(logits_RV, block.params, block.index, sampled[0], sampled[1])
    hand_over(sampled, block.rows, block.places, last, chosen)
    return logits_RV, Device(kv, last, device.edits)


def replaying(m: Machine, graphs: dict[int, Captured]) -> Machine:
    """*m*, which from now on runs every plan that one of *graphs* fits by replaying it."""
    return evolve(m, replay=partial(replay, m, graphs, tuple(sorted(graphs))))


def replay(
    m: Machine, graphs: dict[int, Captured], sizes: Sequence[int], device: Donated[Device], plan: Plan
) -> tuple[Flight, Device] | None:
    """Launch *plan* as a captured graph; None if it is none of one query and one sample a row, or has too many rows.

    *Donates* device unless None. Raises GraphBinding for a device with other memory than was captured over,
    StaleHandle as `stage` does.
    """
    rows = len(plan.rows)
    plain = len(plan.slots) == len(plan.samples) == rows and plan.scored is None
    size = bucket_of(sizes, rows) if plain else None
    if size is None:
        return None
    captured, kv = graphs[size], device.kv
    if bindings(device) != captured.bound:
        raise GraphBinding(f"the graph for {size} rows was captured over other memory than this device has")
    kv.check("replay")
    if plan.base not in (-1, kv.step):
        raise StaleHandle(f"step {plan.step} extends the block tables of step {plan.base}, not those of {kv.step}")
    columns = kv.table.shape[1]
    check_tables(plan.context, columns, kv.block_size)
    where, blocks = table_entries(plan.tables, columns)
    kv = kv.consume("replay")
    if len(where) > captured.block.entries.shape[1] or plan.copies:
        kv = _prepare(kv, plan, where.astype(np.int32), blocks)
        where, blocks = where[:0], blocks[:0]
    sent = lay_out(torch.empty(block_words(size), dtype=torch.int32, pin_memory=True), size)
    left = left_of(m, plan)
    fill(sent, plan, where.astype(np.int32), blocks, sum(left, ()))
    captured.block.whole.copy_(sent.whole, non_blocking=True)
    captured.graph.replay()
    device = Device(holding(kv, plan.step), device.last, device.edits)
    return _after(m, captured.logits_RV, captured.chosen, device, plan, sent.places.numpy()[:rows], *left)


def _after(
    m: Machine, logits_RV: Tensor, chosen: Tensor, device: Donated[Device], plan: Plan, places: I32,
    now: Sequence[int], late: Sequence[int],
) -> tuple[Flight, Device]:  # fmt: skip
    """The flight of *plan*, of which a graph has just made *logits* and *chosen*, after the samples that it leaves
    (`left_of`). *Donates* device. *places*: which row of the plan each of the graph is.
    """
    tp = m.ranks.tp
    if not now and not late and plan.logprobs is None:
        return take_off(plan, chosen), device
    logits_RV = tp.all_gather_last_dim(logits_RV)[:, : m.limits.vocab_size]
    row_of = np.argsort(places)
    basis = basis_of(plan, m.logprobs_mode, logits_RV, row_of) if tp.rank == 0 else None
    waiting = choose_rest(m, device, plan, logits_RV, row_of, chosen, now, late, basis)
    return take_off(plan, chosen, basis, waiting), device


def _prepare(kv: Donated[KvCache], plan: Plan, where: I32, blocks: I32) -> KvCache:
    """Do eagerly, before a replay, what does not fit its block: many table entries, block copies."""
    apply_entries(kv.table, where, blocks)
    return copy_blocks(kv, plan.copies) if plan.copies else kv
