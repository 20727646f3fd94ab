"""Every invariant of the engine's state, checked and said in words. For tests, and for anyone who doubts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentinfer.state.blocks import ROOT, BlockPool
from agentinfer.state.engine import EngineState, known_tokens
from agentinfer.state.ids import BlockId, cdiv, ints
from agentinfer.state.sequence import Running


def violations(state: EngineState) -> list[str]:
    """What is wrong with *state*; empty if nothing is. Costs time in the order of the state's size."""
    found = [*_rows(state), *_pool(state), *_queues(state)]
    for run in state.rows:
        if run is not None:
            found += [f"sequence {run.seq} in row {run.row}: {fault}" for fault in _running(state, run)]
    return found


def _rows(state: EngineState) -> Iterator[str]:
    used = [row for row, run in enumerate(state.rows) if run is not None]
    if len(state.rows) != state.limits.max_num_seqs + 1:
        yield f"{len(state.rows)} rows for max_num_seqs {state.limits.max_num_seqs} and the sink"
    if state.rows[0] is not None:
        yield "row 0, the sink, is in use"
    if sorted(ints(state.order)) != used:
        yield f"order {ints(state.order)} does not list the rows in use {used}"
    by_age = [run.seq for row in ints(state.order) if (run := state.rows[row]) is not None]
    if by_age != sorted(by_age):
        yield f"order is not by age: {by_age}"
    marked = [row for row, seq in enumerate(ints(state.cols.seq)) if seq >= 0]
    if marked != used:
        yield f"Columns.seq marks rows {marked}, in use are {used}"


def _running(state: EngineState, run: Running) -> Iterator[str]:
    cols, row, size = state.cols, run.row, state.limits.block_size
    written, computed, known, length, limit = (
        int(column[row]) for column in (cols.written, cols.computed, cols.known, cols.length, cols.limit)
    )
    if state.rows[row] is not run:
        yield "its record names another row"
    if cols.seq[row] != run.seq:
        yield f"Columns.seq has {cols.seq[row]}"
    if not 0 <= written <= computed <= length:
        yield f"not 0 <= written {written} <= computed {computed} <= length {length}"
    if not known <= length <= max(known + 2, computed):  # drafts in flight: their positions, and none to come
        yield f"not known {known} <= length {length} <= known + 2, nor is it all computed: {computed}"
    if not length <= limit or known >= limit:
        yield f"length {length} or known {known} beyond limit {limit}"
    if written > known:
        yield f"written {written} beyond known {known}"
    if len(run.tokens) != known // size or any(len(block) != size for block in run.tokens):
        yield f"{len(run.tokens)} full blocks of tokens for {known} known ones"
    if len(run.blocks) != cdiv(computed, size):
        yield f"{len(run.blocks)} blocks for {computed} computed positions"
    if len(set(run.blocks)) != len(run.blocks) or ROOT in run.blocks:
        yield f"a block twice in its table, or the sink: {run.blocks}"
    if computed % size and cols.tail_block[row] != run.blocks[-1]:
        yield f"tail_block {cols.tail_block[row]}, its last block is {run.blocks[-1]}"
    if known_tokens(run, known, cols.tail)[: len(run.request.prompt)] != run.request.prompt:
        yield "its tokens do not begin with its prompt"
    if cols.cached[row] > len(run.request.prompt):
        yield f"{cols.cached[row]} tokens cached of a prompt of {len(run.request.prompt)}"
    if known and cols.tail[row, (known - 1) % size] != known_tokens(run, known, cols.tail)[-1]:
        yield "the tail lost the last known token"
    yield from _registered(state, run, written)
    yield from _shared(state, run, computed, written)


def _registered(state: EngineState, run: Running, written: int) -> Iterator[str]:
    pool, size = state.pool, state.limits.block_size
    if run.stale and run.hashes:
        yield f"its KV is of old weights, but {len(run.hashes)} blocks of it are registered"
    versions = [version for _, version in run.versions]
    if versions != sorted({*versions}) or versions[-1] != state.version:
        yield f"its versions {run.versions} do not lead to the state's {state.version}"
    if len(run.hashes) > written // size:
        yield f"{len(run.hashes)} registered blocks, but only {written} positions have landed"
    for i, (block, h, tokens) in enumerate(zip(run.blocks, run.hashes, run.tokens, strict=False)):
        key = pool.keys.get(block)
        if key is None or key.hash != h:
            yield f"block {block} at {i} is not registered under its hash"
            continue
        parent, salt = (run.blocks[i - 1], None) if i else (ROOT, run.request.salt)
        if key.tokens != tokens or key.parent != parent or (i == 0 and key.salt != salt):
            yield f"block {block} at {i} is registered with other content"


def _shared(state: EngineState, run: Running, computed: int, written: int) -> Iterator[str]:
    """A block that is being written, or will be, belongs to one sequence alone."""
    size = state.limits.block_size
    for i in range(written // size, len(run.blocks)):
        block = run.blocks[i]
        will_write = (i + 1) * size > computed or i * size + size > written
        if will_write and (state.pool.refs[block] != 1 or block in state.pool.keys):
            yield f"block {block} at {i} will be written, but is shared or registered"


def _pool(state: EngineState) -> Iterator[str]:
    pool, n = state.pool, state.limits.num_blocks
    held = Counter(block for run in state.rows if run is not None for block in run.blocks)
    free, cached = list(pool.free), set(pool.cached)
    refs = ints(pool.refs)
    if len(refs) != n + 1 or refs[0] != 0:
        yield f"{len(refs)} reference counts for {n} blocks and the sink (held {refs[0]} times)"
    blocks = [BlockId(b) for b in range(1, n + 1)]
    for block in blocks:
        if refs[block] != held[block]:
            yield f"block {block} has {refs[block]} references, {held[block]} tables hold it"
    referenced = {block for block in blocks if refs[block] > 0}
    if sorted([*free, *cached, *referenced]) != list(range(1, n + 1)):
        places = f"free {sorted(free)}, cached {sorted(cached)}, referenced {sorted(referenced)}"
        yield f"{places} do not add up to {n} blocks"
    yield from _cache(pool, free)


def _cache(pool: BlockPool, free: list[BlockId]) -> Iterator[str]:
    if {block for block in free if block in pool.keys}:
        yield "a free block is registered"
    if len(pool.index) != len(pool.keys):
        yield f"{len(pool.index)} hashes for {len(pool.keys)} registered blocks"
    for block, key in pool.keys.items():
        if pool.index.get(key.hash) != block:
            yield f"hash of block {block} finds {pool.index.get(key.hash)}"
        if key.parent != ROOT and key.parent not in pool.keys:
            yield f"block {block} outlived its parent {key.parent} in the cache"
        if block not in pool.cached and pool.refs[block] == 0:
            yield f"block {block} is registered, but neither cached nor referenced"
    entries = [entry for entry in pool.lru if pool.cached.get(entry[0]) == entry[1]]
    if sorted(entries) != sorted(pool.cached.items()):
        yield "the eviction queue does not list the cached blocks"
    if [ticket for _, ticket in entries] != sorted(ticket for _, ticket in entries):
        yield "the eviction queue is not in order of release"
    tickets = dict(entries)
    for block, ticket in entries:
        parent = pool.keys[block].parent
        if parent in tickets and tickets[parent] < ticket:
            yield f"cached block {block} would outlive its parent {parent}"


def _queues(state: EngineState) -> Iterator[str]:
    waiting = [*state.requeued, *state.waiting]
    live = [w.seq for w in waiting] + [run.seq for run in state.rows if run is not None]
    if len(live) != len(set(live)):
        yield f"a sequence is in two places: {sorted(live)}"
    if any(not 0 <= seq < state.next_seq for seq in live):
        yield f"a sequence number that was never given out: {sorted(live)}"
    ages = [w.seq for w in state.requeued]
    if ages != sorted(ages):
        yield f"requeued is not by age: {ages}"
    for w in waiting:
        if w.tokens[: len(w.request.prompt)] != w.request.prompt:
            yield f"waiting sequence {w.seq} lost its prompt"
