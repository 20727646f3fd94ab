"""The block pool: reference counts, the prefix cache, who is evicted, and hashes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.state.blocks import ROOT, BlockPool, PoolDraft, block_hash
from agentinfer.state.ids import BlockId, cdiv
from agentinfer.testing import Drive, answer
from agentinfer.testing.strategies import constant_hash, sum_hash
from engines import BOTH, blocks_of, drive, limits, request

REUSE = {  # (prompt, tokens shared with the one before, block size): tokens not computed again
    (8, 8, 4): 4, (9, 9, 4): 8, (9, 8, 4): 8, (7, 7, 4): 4, (4, 4, 4): 0, (5, 4, 4): 4, (1, 1, 4): 0, (1, 1, 1): 0,
    (12, 10, 4): 8, (32, 32, 16): 16, (33, 33, 16): 32, (5, 5, 4): 4,
}  # fmt: skip


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_four_for_so_many_tokens(tokens: int, blocks: int) -> None:
    """A block is taken for its first token and the next one for the fifth."""
    assert cdiv(tokens, 4) == blocks


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", REUSE, ids=str)
def test_the_last_token_is_always_computed(case: tuple[int, int, int], policy, overlap: bool) -> None:
    """A prompt finds floor((length - 1) / block) blocks of its like, no more, and answers as it would without."""
    length, shared, size = case
    engine = drive(limits(block_size=size), policy, overlap=overlap)
    first = engine.arrive(request(range(length), 3))
    engine.drain()
    second = engine.arrive(request((*range(shared), *range(100, 100 + length - shared)), 3))
    engine.drain()
    assert engine.over[second].cached == REUSE[case]
    assert engine.over[first].cached == 0
    assert shared != length or engine.over[second].output == engine.over[first].output


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("prompt", "tables"), [(3, [1, 1, 2, 2, 2, 2, 3]), (4, [1, 2, 2, 2, 2, 3, 3]), (5, [2, 2, 2, 2, 3, 3, 3])]
)
def test_a_block_is_taken_by_the_step_that_writes_into_it(prompt: int, tables: list[int], cache: bool) -> None:
    """Before position p is written the table has ceil((p + 1) / 4) blocks, after prefill and in every decode."""
    engine = drive(limits(prefix_cache=cache))
    seq = engine.arrive(request(prompt, 8))
    seen = []
    for _ in tables:
        engine.step()
        seen.append(len(blocks_of(engine.state, seq)))
    assert seen == tables


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    """Of three cached blocks one must go: the last, so that a longer prompt still finds eight tokens."""
    engine = drive(limits(num_blocks=4))
    for asked, cached in ((range(12), 0), (range(50, 55), 0), (range(13), 8)):
        seq = engine.arrive(request(asked))
        before = engine.state.pool
        engine.drain()
        assert engine.over[seq].cached == cached
        gone = [key.hash for block, key in before.keys.items() if engine.state.pool.keys.get(block) != key]
        found = [engine.state.pool.index.get(h) for h in gone]
        assert all(
            block is None or engine.state.pool.keys[block].hash == h for block, h in zip(found, gone, strict=True)
        )
    tokens = [engine.state.pool.keys[block].tokens for block in engine.state.pool.index.values()]
    assert sorted(tokens) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_the_least_recently_used_chain_goes_first() -> None:
    """A hit makes a whole chain young again: the other chain, older by now, gives up its blocks."""
    engine = drive(limits(num_blocks=5))
    old, young = range(9), range(20, 29)
    for asked in (old, young, old, range(40, 48)):  # each leaves two full blocks; the last needs two
        engine.arrive(request(asked))
        engine.drain()
    again = [engine.arrive(request(asked)) for asked in (old, young)]
    engine.drain()
    assert [engine.over[seq].cached for seq in again] == [8, 0]


SALTED = {
    "none": (None, range(8)), "x": ("x", range(8)), "empty": ("", range(8)), "a": ("a", range(8)),
    "ab": ("ab", range(8)), "token": (None, (120, *range(7))), "tokens": (None, (0, 1, *range(6))),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(SALTED, 2)))
def test_no_two_salts_share_a_block(one: str, other: str) -> None:
    """Equal tokens under another salt, or tokens that look like a salt, are another prefix."""
    engine = drive(limits())
    (salt, tokens), (salt_2, tokens_2) = SALTED[one], SALTED[other]
    engine.arrive(request(tokens, salt=salt))
    engine.drain()
    seq, again = engine.arrive(request(tokens_2, salt=salt_2)), engine.arrive(request(tokens, salt=salt))
    engine.drain()
    assert engine.over[seq].cached == 0
    assert engine.over[again].cached == 4


def test_hashes_tell_salts_parents_seeds_and_tokens_apart() -> None:
    """Hashes of different (seed, parent, salt, tokens) differ, field by field and across fields."""
    salts = (None, "", "x", "xy", "\x00", "none", "salt", "\ud800")
    cases = list(itertools.product((0, 1, 2**63 - 1), (0, 1, 2**64 - 1), salts, ((0,), (0, 0), (1, 2), (2, 1))))
    assert len({block_hash(*case) for case in cases}) == len(cases)


def test_two_processes_agree_on_hashes() -> None:
    """The hash of a block does not depend on the process that computes it."""
    code = "from agentinfer.state.blocks import block_hash; print(block_hash(3, 5, 'salt', (1, 2, 3)))"
    for seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(out.stdout) == block_hash(3, 5, "salt", (1, 2, 3))


@pytest.mark.parametrize("hasher", [constant_hash, sum_hash])
@pytest.mark.parametrize("policy", BOTH)
def test_a_collision_never_gives_another_prompts_blocks(hasher, policy) -> None:
    """With a hash that collides, answers are those without a cache: tokens and parents are compared on a hit."""
    engine = drive(limits(), policy, hasher=hasher)
    asked = [
        request(p, 4) for p in (range(1, 10), range(11, 20), (1, 2, 3, 4, 5, 6, 7, 8, 9), (4, 3, 2, 1, 5, 6, 7, 8, 9))
    ]
    for each in asked:
        seq = engine.arrive(each)
        engine.drain()
        assert (
            engine.over[seq].tokens == answer(engine.limits, each, engine.ghost.scripts[seq].seed, each.prompt).tokens
        )
    assert engine.over[1].cached == engine.over[3].cached == 0
    assert engine.over[2].cached > 0


@pytest.mark.parametrize("hasher", [constant_hash, sum_hash])
def test_equal_tokens_after_another_prefix_are_another_block(hasher) -> None:
    """A prompt that repeats one block has the same tokens at two places: the parent tells them apart."""
    engine = drive(limits(), hasher=hasher)
    for _ in range(2):
        seq = engine.arrive(request([7] * 13, 3))
        engine.drain()
    assert engine.over[seq].cached in (4, 8, 12)
    draft = PoolDraft(BlockPool.empty(3), 0, constant_hash)
    (block,) = draft.take(1)
    assert draft.register(block, ROOT, None, (7,), 7)
    assert draft.find(block, None, (7,)) == (None, 7)


def test_two_equal_prompts_at_once_end_up_on_the_same_blocks() -> None:
    """Computed side by side, equal full blocks are exchanged for one of them when they land."""
    engine = drive(limits())
    one, two = (engine.arrive(request(range(10), 6)) for _ in range(2))
    engine.step()
    assert not set(blocks_of(engine.state, one)) & set(blocks_of(engine.state, two))
    engine.step()
    tables = blocks_of(engine.state, one), blocks_of(engine.state, two)
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    assert engine.state.pool.refs[list(tables[0])].tolist() == [2, 2, 1]
    engine.drain()


class NaivePool:
    """A pool as plain lists: who holds what, and the cached ones, next to go first."""

    def __init__(self, n: int) -> None:
        self.free = list(range(1, n + 1))
        self.lru: list[int] = []
        self.refs = dict.fromkeys(self.free, 0)
        self.known: dict[int, tuple[int, int]] = {}  # block: (parent, content)

    def take(self, n: int) -> list[int]:
        taken = []
        for _ in range(n):
            block = self.free.pop(0) if self.free else self.lru.pop(0)
            self.known.pop(block, None)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.lru:
                self.lru.remove(block)
            self.refs[block] += 1

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (self.lru if block in self.known else self.free).append(block)


@given(st.data(), st.integers(1, 9))
def test_the_pool_is_the_naive_pool(data: st.DataObject, n: int) -> None:
    """Random chains taken, registered, found, shared and dropped agree with lists, block by block."""
    pool, naive = BlockPool.empty(n), NaivePool(n)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        draft = PoolDraft(pool, 0)
        room = len(naive.free) + len(naive.lru)
        assert draft.num_available == room
        if tables and data.draw(st.booleans()):
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            draft.drop(BlockId(b) for b in table)
            naive.drop(table)
        else:
            wanted = data.draw(st.lists(st.integers(0, 1), max_size=4))
            table = _find(draft, naive, wanted)
            revived = sum(naive.refs[block] == 0 for block in table)
            if len(wanted) - len(table) <= room - revived:
                draft.hold(table)
                naive.hold(table)
                own = draft.take(len(wanted) - len(table))
                assert list(own) == naive.take(len(wanted) - len(table))
                table = [*table, *own]
                _register(draft, naive, table, wanted, data.draw(st.integers(0, len(table))))
                tables.append(table)
        pool = draft.freeze()
        assert pool.refs[1:].tolist() == [naive.refs[b] for b in range(1, n + 1)]
        assert list(pool.free) == naive.free
        assert sorted(pool.cached) == sorted(naive.lru)
        assert {b: (key.parent, *key.tokens) for b, key in pool.keys.items()} == naive.known


def _find(draft: PoolDraft, naive: NaivePool, wanted: list[int]) -> list[int]:
    found: list[int] = []
    for token in wanted:
        above = found[-1] if found else ROOT
        block, _ = draft.find(BlockId(above), None, (token,))
        at = [b for b, content in naive.known.items() if content == (above, token)]
        assert at == ([] if block is None else [block])
        if block is None:
            break
        found.append(block)
    return found


def _register(draft: PoolDraft, naive: NaivePool, table: list[int], wanted: list[int], upto: int) -> None:
    for i in range(upto):
        above = table[i - 1] if i else ROOT
        block, h = draft.find(BlockId(above), None, (wanted[i],))
        if table[i] in naive.known:
            continue
        if block is not None:
            return  # another block has this content
        assert draft.register(BlockId(table[i]), BlockId(above), None, (wanted[i],), h)
        naive.known[table[i]] = (above, wanted[i])


def test_a_hash_that_is_taken_registers_nothing() -> None:
    """The second content with one hash stays unknown, and the first is still found."""
    draft = PoolDraft(BlockPool.empty(2), 0, constant_hash)
    one, two = draft.take(2)
    assert draft.register(one, ROOT, None, (1,), 7)
    assert not draft.register(two, ROOT, None, (2,), 7)
    assert draft.find(ROOT, None, (1,)) == (one, 7)
    assert draft.find(ROOT, None, (2,)) == (None, 7)


def test_a_frozen_pool_never_changes() -> None:
    """What a draft does to a pool shows in the pool that it freezes to, and nowhere else."""
    pool = BlockPool.empty(3)
    draft = PoolDraft(pool, 0)
    draft.take(2)
    after = draft.freeze()
    assert (len(pool.free), len(after.free)) == (3, 1)
    assert pool.refs.tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        after.refs[1] = 5


@pytest.mark.parametrize("size", [1, 4, 16])
def test_after_a_long_walk_every_block_can_be_had_at_once(size: int) -> None:
    """Hundreds of sequences that share, end, fail and leave later, one sequence may take the whole pool."""
    lim = limits(block_size=size, num_blocks=24, max_model_len=24 * size + 1, max_num_batched_tokens=24 * size)
    engine: Drive = drive(lim)
    for i in range(200):
        seq = engine.arrive(request([j % (2 + i % 3) for j in range(1 + i * 7 % (6 * size))], 1 + i % 5))
        engine.step(land_fails=i % 17 == 0, bad=i if i % 13 == 0 else None)
        if i % 5 == 0:
            engine.abort(seq)
    engine.drain()
    whole = engine.arrive(request([900] * (24 * size), 1))
    engine.drain()
    assert engine.over[whole].reason == "length"
