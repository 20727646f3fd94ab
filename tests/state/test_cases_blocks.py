"""Faults that paged KV and prefix caches were found to have, one behaviour a test: exact numbers, then the whole kind.

`drive` runs over the ghost device, whose model is a hash of what the KV slots hold: it notices wrong KV, and checks
every invariant after every transition.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest

from agentinfer.errors import InvalidRequest
from agentinfer.state.admit import validate
from agentinfer.state.blocks import ROOT, PoolDraft, block_hash
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, tokens_of
from agentinfer.state.ids import cdiv, ints
from agentinfer.state.policy import reserve, throughput
from agentinfer.testing import Drive, answer
from engines import BOTH, Hand, blocks_of, drive, in_use, limits, ranges, request

both_policies = pytest.mark.parametrize("policy", BOTH, ids=lambda policy: policy.__name__)
both_orders = pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])

two_modes = pytest.mark.parametrize(
    ("policy", "overlap"), [(throughput, True), (reserve, False)], ids=["throughput-overlap", "reserve-alone"]
)


def serve(engine: Drive, *asked) -> list[int]:
    """Serve *asked* one after the other."""
    seqs = []
    for each in asked:
        seqs.append(engine.arrive(each))
        engine.drain()
    return seqs


def chain(tokens, size: int, seed: int = 0, salt: str | None = None) -> list[int]:
    """The hash of every full block of *tokens*."""
    hashes, above = [], 0
    for first in range(0, len(tokens) - size + 1, size):
        above = block_hash(seed, above, None if hashes else salt, tuple(tokens[first : first + size]))
        hashes.append(above)
    return hashes


def found(state: EngineState, tokens, size: int) -> int:
    """Leading blocks of *tokens* that the cache has, asked block by block."""
    pool, above, blocks = PoolDraft(state.pool, state.limits.seed), ROOT, 0
    for first in range(0, len(tokens) - size + 1, size):
        block, _ = pool.find(above, None, tuple(tokens[first : first + size]))
        if block is None:
            break
        above, blocks = block, blocks + 1
    return blocks


# ------------------------------------------------------------------------------------ something is left to compute

REUSE = {  # (tokens, shared with the prompt before, block size): tokens that are not computed again
    (8, 8, 4): 4, (9, 9, 4): 8, (9, 8, 4): 8, (7, 7, 4): 4, (4, 4, 4): 0, (5, 4, 4): 4, (1, 1, 4): 0, (1, 1, 1): 0,
    (12, 10, 4): 8, (32, 32, 16): 16, (33, 33, 16): 32, (5, 5, 4): 4,
}  # fmt: skip


@both_policies
@both_orders
def test_kv_01_the_table_of_hits(policy, overlap: bool) -> None:
    """A prompt finds so many tokens of the one before, computes the rest, and is answered as without a cache."""
    for (length, shared, size), cached in REUSE.items():
        engine = drive(limits(block_size=size), policy, overlap=overlap)
        prompt = (*range(shared), *range(100, 100 + length - shared))
        first, second = serve(engine, request(range(length), 3), request(prompt, 3))
        assert (engine.over[first].cached, engine.over[second].cached) == (0, cached)
        assert ranges(engine.plans, second)[0] == (cached, length)
        if shared == length:
            assert engine.over[second].output == engine.over[first].output


@two_modes
@pytest.mark.parametrize("size", [1, 4, 16])
def test_kv_01_the_last_token_is_always_computed(policy, overlap: bool, size: int) -> None:
    """The same prompt again finds floor((length - 1) / block) * block tokens, for every length, and answers alike."""
    for length in (1, size - 1, size, size + 1, 2 * size, 2 * size + 1):
        if length < 1:
            continue
        engine = drive(limits(block_size=size, num_blocks=16), policy, overlap=overlap)
        seqs = serve(engine, *[request(range(length), 2)] * 2)
        assert [engine.over[seq].cached for seq in seqs] == [0, (length - 1) // size * size]
        assert len({engine.over[seq].output for seq in seqs}) == 1


def test_kv_01_nobody_writes_into_a_block_that_others_hold() -> None:
    """Two prompts of 8 that run at once after a third of their like share one block, and own what they write."""
    engine = drive(limits())
    serve(engine, request(range(8), 2))
    one, two = engine.arrive(request(range(8), 5)), engine.arrive(request(range(8), 5))
    engine.step()
    tables = [blocks_of(engine.state, seq) for seq in (one, two)]
    assert tables[0][0] == tables[1][0]
    assert len({*tables[0], *tables[1]}) == 3
    assert engine.state.pool.refs[tables[0][0]] == 2
    engine.drain()


# ------------------------------------------------------------------------------------------ no block early or late

TABLES = {3: [1, 1, 2, 2, 2, 2, 3], 4: [1, 2, 2, 2, 2, 3, 3], 5: [2, 2, 2, 2, 3, 3, 3]}
"""Tokens of the prompt: blocks of 4 held by the prefill step and by each of six decodes."""


@both_policies
@both_orders
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("prompt", TABLES)
def test_kv_02_the_table_grows_with_the_step_that_writes(policy, overlap: bool, cache: bool, prompt: int) -> None:
    """Before position p is written the table has ceil((p + 1) / 4) blocks: 4 -> 1, 2 at the first decode, 3 at 8."""
    engine = drive(limits(prefix_cache=cache), policy, overlap=overlap)
    seq = engine.arrive(request(prompt, 9))
    seen = []
    for _ in TABLES[prompt]:
        engine.step()
        seen.append(len(blocks_of(engine.state, seq)))
    assert seen == TABLES[prompt]
    engine.drain()


@two_modes
@pytest.mark.parametrize("size", [1, 3, 8])
def test_kv_02_no_table_is_ever_longer(policy, overlap: bool, size: int) -> None:
    """In chunks and decodes of any length, with hits and without, tables have ceil(context / block) blocks."""
    for length, budget in ((size, 64), (size + 1, 3), (2 * size - 1, 1)):
        engine = drive(limits(block_size=size, num_blocks=16, max_num_batched_tokens=budget), policy, overlap=overlap)
        seqs = [engine.arrive(request(range(i, i + length), 4)) for i in (0, 50)]
        for _ in range(length * 2 + 2):
            engine.step()
            if not engine.live:
                break
            for seq, context in zip(ints(engine.plans[-1].seqs), ints(engine.plans[-1].context), strict=True):
                assert len(blocks_of(engine.state, seq)) == (cdiv(context, size) if seq in engine.live else 0)
        engine.drain()
        assert set(seqs) == set(engine.over)


def test_kv_02_blocks_of_so_many_tokens() -> None:
    """Prefilled prompts of 1, 3, 4, 5, 8 and 9 tokens hold 1, 1, 1, 2, 2 and 3 blocks of 4; none holds none."""
    assert in_use(drive(limits()).state) == 0
    for tokens, blocks in {1: 1, 3: 1, 4: 1, 5: 2, 8: 2, 9: 3}.items():
        engine = drive(limits())
        engine.arrive(request(tokens, 2))
        engine.step()
        assert in_use(engine.state) == blocks
        assert engine.state.pool.num_available == 64 - blocks


# -------------------------------------------------------------------------------------------------------- eviction


@both_policies
@both_orders
def test_kv_04_the_tail_goes_first(policy, overlap: bool) -> None:
    """In a pool of 4, of 12 cached tokens the last 4 make room for a prompt of 5; then 13 tokens find 8."""
    engine = drive(limits(num_blocks=4), policy, overlap=overlap)
    old = chain(range(12), 4)
    serve(engine, request(range(12)))
    assert [h in engine.state.pool.index for h in old] == [True, True, True]
    serve(engine, request(range(50, 55)))
    assert [h in engine.state.pool.index for h in old] == [True, True, False]
    assert found(engine.state, range(12), 4) == 2
    (seq,) = serve(engine, request(range(13)))
    assert engine.over[seq].cached == 8
    assert found(engine.state, range(12), 4) == 3


@both_policies
@pytest.mark.parametrize("size", [1, 4])
def test_kv_04_exactly_what_is_needed_is_evicted(policy, size: int) -> None:
    """k blocks taken from a pool with f free ones cost a cached chain its last max(0, k - f) blocks, no others."""
    for length, free, wanted in itertools.product((1, 3, 5), (1, 2), (1, 2, 4)):
        if wanted > length + free:
            continue
        engine = drive(limits(block_size=size, num_blocks=length + free, prefix_cache=True), policy)
        old, new = range(length * size), range(500, 500 + wanted * size)
        serve(engine, request(old), request(new))
        kept = length - max(0, wanted - free)
        assert [h in engine.state.pool.index for h in chain(old, size)] == [i < kept for i in range(length)]
        assert set(engine.state.pool.index) == {*chain(old, size)[:kept], *chain(new, size)}
        for h, block in engine.state.pool.index.items():
            assert engine.state.pool.keys[block].hash == h
        (seq,) = serve(engine, request((*old, 999)))
        assert engine.over[seq].cached == kept * size


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_kv_04_the_least_recently_used_chain_goes_first(order: tuple[int, ...]) -> None:
    """Of three chains of two blocks, used again in any order, the one used longest ago goes first, tail first."""
    chains = [range(100 * i, 100 * i + 9) for i in range(3)]
    for blocks in (2, 3, 4, 6):
        engine = drive(limits(num_blocks=7))
        serve(engine, *(request(tokens) for tokens in chains))
        again = serve(engine, *(request(chains[i]) for i in order))
        assert [engine.over[seq].cached for seq in again] == [8, 8, 8]
        serve(engine, request(range(500, 500 + 4 * blocks)))
        leaving = [h for i in order for h in reversed(chain(chains[i], 4))]
        gone = [h for h in leaving if h not in engine.state.pool.index]
        assert gone == leaving[: blocks - 1]


@two_modes
def test_kv_04_a_parent_outlives_its_children(policy, overlap: bool) -> None:
    """Over a random tree of prompts in a pool too small for it, no block is cached whose parent is not."""
    dice = random.Random(4)
    engine = drive(limits(num_blocks=9, max_num_seqs=3), policy, overlap=overlap)
    for _ in range(24):
        prompt = [token for _ in range(dice.randint(1, 4)) for token in [dice.randrange(2)] * 4]
        engine.arrive(request((*prompt, 9), dice.randint(1, 5)))
        for _ in range(dice.randint(0, 3)):
            engine.step()
            pool = engine.state.pool
            for key in pool.keys.values():
                assert key.parent == ROOT or key.parent in pool.cached or pool.refs[key.parent] > 0
    engine.drain()
    assert sum(done.cached > 0 for done in engine.over.values()) > 5


# ----------------------------------------------------------------------------------------------------------- salts

SALTS = (None, "", "x", "a", "ab", "none", "salt", "x\x00", "\ud800")


@pytest.mark.parametrize("salt", SALTS, ids=repr)
def test_kv_06_a_salt_shares_with_itself_only(salt: str | None) -> None:
    """Eight equal tokens under nine salts are nine prefixes; the same salt again finds 4 of them."""
    engine = drive(limits(num_blocks=24))
    serve(engine, *(request(range(8), salt=other) for other in SALTS if other != salt))
    assert len(engine.state.pool.keys) == 2 * (len(SALTS) - 1)
    first, again = serve(engine, *[request(range(8), salt=salt)] * 2)
    assert (engine.over[first].cached, engine.over[again].cached) == (0, 4)


def test_kv_06_tokens_are_no_salt() -> None:
    """Tokens that spell a salt, its length or its tag are other tokens, under any salt."""
    words = [b"x", b"salt", b"none", b"\x04salt"]
    prompts = [(*word, *range(8)) for word in words] + [tuple(range(8))]
    engine = drive(limits(num_blocks=128))
    seqs = serve(engine, *(request(prompt[:8], salt=salt) for prompt in prompts for salt in (None, "x", "salt")))
    assert [engine.over[seq].cached for seq in seqs] == [0] * 15


def test_kv_06_the_salt_is_in_the_first_block_and_so_in_all() -> None:
    """Hashes chain: under another salt, seed or first token every block of a prompt has another hash."""
    chains = [
        chain(tokens, 4, seed, salt)
        for tokens, seed, salt in itertools.product((range(16), (9, *range(1, 16))), (0, 1, 2**62), (None, "", "x"))
    ]
    assert len({h for hashes in chains for h in hashes}) == 2 * 3 * 3 * 4
    for seed in (0, 5):
        engine = drive(limits(seed=seed))
        serve(engine, request(range(16), salt="x"))
        assert set(engine.state.pool.index) == set(chain(range(16), 4, seed, "x"))


PROGRAM = """
from agentinfer.state.admit import arrive
from agentinfer.state.commit import commit
from agentinfer.state.engine import digest, initial
from agentinfer.state.limits import Limits
from agentinfer.state.plan import sampled
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.schedule import schedule
sizes = dict(block_size=4, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, vocab_size=100)
state = initial(Limits(**sizes, seed={seed}))
for salt in (None, "x", ""):
    state, _ = arrive(state, Request(range(9), SamplingParams(max_tokens=4), salt))
for _ in range(7):
    state, plan = schedule(state)
    state, _ = commit(state, plan, sampled(plan, [7] * len(plan.samples)))
print(digest(state), *sorted(state.pool.index), *(run.seed for run in state.rows if run is not None))
"""


def run_program(seed: int, hash_seed: str) -> str:
    """What PROGRAM prints in a process of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    code = PROGRAM.format(seed=seed)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_kv_06_two_processes_agree() -> None:
    """With equal seeds two processes give equal states, hashes and drawn seeds; with another seed all differ."""
    one, two, other = run_program(0, "1"), run_program(0, "2"), run_program(3, "1")
    assert one == two
    assert len(one.split()) >= 6
    assert not set(one.split()) & set(other.split())
    hashes = {int(word) for word in one.split()[1:]}
    assert {h for salt in (None, "x", "") for h in chain(range(8), 4, 0, salt)} <= hashes


# ------------------------------------------------------------------------------------------------------ collisions


def constant(seed: int, parent: int, salt: str | None, tokens: tuple[int, ...]) -> int:
    """Every block collides with every other."""
    return 7


def summed(seed: int, parent: int, salt: str | None, tokens: tuple[int, ...]) -> int:
    """Blocks of equal sums collide, whatever came before them."""
    return sum(tokens)


def parentless(seed: int, parent: int, salt: str | None, tokens: tuple[int, ...]) -> int:
    """Equal tokens collide at every place and under every salt."""
    return block_hash(seed, 0, None, tokens)


@both_policies
@pytest.mark.parametrize("hasher", [constant, summed, parentless])
def test_kv_07_a_collision_shows_in_nothing(policy, hasher) -> None:
    """With hashes that collide every answer is the one without a cache, and only true prefixes are found."""
    prompts = [
        range(1, 10), range(11, 20), (1, 2, 3, 4, 5, 6, 7, 8, 9), (4, 3, 2, 1, 5, 6, 7, 8, 9),
        (5, 6, 7, 8, 1, 2, 3, 4, 9), (7,) * 13, (5, 6, 7, 8, 5, 6, 7, 8, 9),
    ]  # fmt: skip
    engine = drive(limits(num_blocks=32), policy, hasher=hasher)
    for prompt, salt in itertools.product(prompts, (None, "x")):
        asked = request(prompt, 4, salt)
        (seq,) = serve(engine, asked)
        assert engine.over[seq].tokens == answer(engine.limits, asked, 0, asked.prompt).tokens
        if hasher is constant:
            assert engine.over[seq].cached == (4 if salt is None and prompt[:4] == (1, 2, 3, 4) else 0)


@both_policies
@pytest.mark.parametrize("hasher", [constant, summed, parentless])
def test_kv_07_colliding_prompts_at_once(policy, hasher) -> None:
    """The same holds for prompts that run side by side, in a pool that must evict, with blocks of 1, 2 and 4."""
    for size in (1, 2, 4):
        engine = drive(limits(block_size=size, num_blocks=40 // size), policy, overlap=True, hasher=hasher)
        asked = [request(prompt, 5) for prompt in ((1, 2, 3, 4, 5), (4, 3, 2, 1, 5), (1, 4, 2, 3, 5), (1, 2, 3, 4, 6))]
        seqs = [engine.arrive(each) for each in (*asked, *asked)]
        engine.drain()
        for seq, each in zip(seqs, (*asked, *asked), strict=True):
            assert engine.over[seq].tokens == answer(engine.limits, each, 0, each.prompt).tokens


# ----------------------------------------------------------------------------------------------------------- forks


def blocks_expected(state: EngineState) -> int:
    """Blocks that must be in use: one a different landed full prefix, and each sequence's own ones behind those."""
    size, prefixes, own = state.limits.block_size, set(), 0
    for run in filter(None, state.rows):
        tokens, landed = tokens_of(state, run.seq), int(state.cols.written[run.row]) // size
        prefixes |= {tokens[: size * (i + 1)] for i in range(landed)}
        own += len(run.blocks) - landed
    return len(prefixes) + own


@both_policies
@both_orders
def test_kv_09_three_ways_on_from_six_tokens(policy, overlap: bool) -> None:
    """n=3, prompt 6, 5 tokens: block 0 is held 3 times, 1+3 blocks at the first decode, 1+3*2 at the end, then 0."""
    engine = drive(limits(), policy, overlap=overlap)
    asked = request(range(6), 5, seed=5, temperature=1.0)
    parent = engine.arrive(asked)
    family = (parent, *engine.fork(parent, (6, 7)))
    used: list[int] = []
    while engine.live:
        engine.step()
        if len(engine.plans) > 1 and engine.live:
            used.append(in_use(engine.state))
            tables = [table for seq in family if (table := blocks_of(engine.state, seq))]
            written = {table[-1] for table in tables}
            assert len(written) == len(tables)
            if len(engine.plans) > 2 and len(engine.live) == 3:
                assert engine.state.pool.refs[tables[0][0]] == len(tables) == 3
    engine.drain()
    if not overlap:  # else the children, who wait until the prompt has landed, are a step behind their parent
        assert (used[0], max(used)) == (4, 7)
    for seq, seed in zip(family, (5, 6, 7), strict=True):
        assert engine.over[seq].output == answer(engine.limits, asked, seed, asked.prompt).tokens[6:]
        assert len(engine.over[seq].output) == 5
    assert len({engine.over[seq].output for seq in family}) > 1
    assert (in_use(engine.state), engine.state.pool.num_available) == (0, 64)


@two_modes
@pytest.mark.parametrize("size", [1, 4, 16])
def test_kv_09_forks_at_any_time(policy, overlap: bool, size: int) -> None:
    """Forked while it waits, prefills or decodes: shared is what has landed, answers are those of separate requests."""
    for length, steps in ((3, 2), (6, 1), (8, 4)):
        engine = drive(limits(block_size=size, num_blocks=60, max_num_batched_tokens=16), policy, overlap=overlap)
        asked = request(range(length), 7, seed=5, temperature=1.0)
        parent = engine.arrive(asked)
        for _ in range(steps):
            engine.step()
        known = tokens_of(engine.state, parent)
        family = {parent: 5} | dict(zip(engine.fork(parent, (6, None, 8)), (6, 5, 8), strict=True))
        while engine.live:
            engine.step()
            if not overlap:
                assert in_use(engine.state) == blocks_expected(engine.state)
        for seq, seed in family.items():
            base = asked.prompt if seq == parent else known
            assert engine.over[seq].tokens == answer(engine.limits, asked, seed, base).tokens
        engine.drain()
        assert engine.state.pool.num_available == 60


@two_modes
@pytest.mark.parametrize("gone", range(4))
def test_kv_09_one_leaves_and_the_others_go_on(policy, overlap: bool, gone: int) -> None:
    """The parent or a child aborted at any step, the others are answered in full, and all blocks come back."""
    for steps in (0, 2):
        engine = drive(limits(num_blocks=16), policy, overlap=overlap)
        asked = request(range(6), 5, seed=5, temperature=1.0)
        parent = engine.arrive(asked)
        engine.step()
        known = tokens_of(engine.state, parent)
        family = (parent, *engine.fork(parent, (6, 7, 8)))
        for _ in range(steps):
            engine.step()
        leaves = family[gone] in engine.live
        engine.abort(family[gone])
        engine.drain()
        for i, seed in enumerate((5, 6, 7, 8)):
            if i != gone or not leaves:
                base = known if i else asked.prompt
                assert engine.over[family[i]].tokens == answer(engine.limits, asked, seed, base).tokens
        assert engine.state.pool.num_available == 16


# ----------------------------------------------------------------------------------------------- it always adds up


def count(state: EngineState) -> None:
    """Free, cached and referenced blocks are apart and make N; references are entries of live tables."""
    pool, n = state.pool, state.limits.num_blocks
    free, cached = list(pool.free), set(pool.cached)
    refs = ints(pool.refs)
    held = {block for block in range(1, n + 1) if refs[block] > 0}
    assert len(free) == len(set(free))
    assert not {*free} & cached
    assert not {*free, *cached} & held
    assert len(free) + len(cached) + len(held) == n
    assert min(refs) >= 0 == refs[0]
    tables = [block for run in state.rows if run is not None for block in run.blocks]
    assert sum(refs) == len(tables)
    assert set(tables) == held
    assert not set(free) & set(pool.keys)
    assert cached <= set(pool.keys)
    assert pool.num_available == n - len(held)


@two_modes
@pytest.mark.parametrize("size", [1, 4, 16])
def test_kv_10_blocks_add_up_over_a_random_walk(policy, overlap: bool, size: int) -> None:
    """After any submit, step, abort, fork, preemption or failure 24 blocks add up, and one sequence can have all."""
    dice = random.Random(100 * size + overlap)
    n = 24
    sizes = {"block_size": size, "num_blocks": n, "max_model_len": n * size + 1, "max_num_batched_tokens": 4 * size}
    engine = drive(limits(max_num_seqs=5, **sizes), policy, overlap=overlap)
    shared = [dice.randrange(1000) for _ in range(12 * size)]
    for _ in range(32):
        dart = dice.random()
        if dart < 0.35:
            prompt = [dice.randrange(1000) for _ in range(dice.randint(1, 6 * size))]
            if dice.random() < 0.3:
                prompt = [*shared[: dice.randint(1, 12 * size)], *prompt[:3]]
            engine.arrive(request(prompt, dice.randint(1, 2 * size + 4)))
        elif dart < 0.45 and engine.live:
            engine.abort(dice.choice(engine.live))
        elif dart < 0.5 and engine.live:
            engine.fork(dice.choice(engine.live), (1, 2))
        elif dart < 0.54 and engine.snapshots:
            engine.rewind(0)
        else:
            engine.step(launch_fails=dice.random() < 0.05)
        count(engine.state)
    engine.drain()
    count(engine.state)
    assert len(engine.state.pool.free) + len(engine.state.pool.cached) == n
    (seq,) = serve(engine, request([900, *range(n * size - 1)]))
    assert (engine.over[seq].reason, len(engine.over[seq].output)) == ("length", 1)
    assert set(engine.state.pool.index) == set(chain(engine.over[seq].tokens[:-1], size))


# ---------------------------------------------------------------------------------------- no longer than the table


@both_policies
@both_orders
def test_kv_12_a_table_of_two_columns(policy, overlap: bool) -> None:
    """With a context of 8 in blocks of 4, lengths of 9 and 8 + 1 are refused by name before anything is planned."""
    engine = drive(limits(max_model_len=8), policy, overlap=overlap)
    for prompt, tokens, field in ((9, 1, "prompt"), (8, 1, "prompt"), (8, None, "prompt"), (7, 2, "max_tokens")):
        with pytest.raises(InvalidRequest, match="max_model_len 8") as caught:
            validate(engine.limits, request(prompt, tokens))
        assert caught.value.field == field
        seq = engine.arrive(request(prompt, tokens))
        engine.drain()
        assert (engine.over[seq].reason, engine.over[seq].output) == ("rejected", ())
    assert engine.plans == []
    seqs = [engine.arrive(request(prompt, tokens)) for prompt, tokens in ((7, 1), (7, None), (1, 7), (1, None), (4, 4))]
    engine.drain()
    assert [len(engine.over[seq].tokens) for seq in seqs] == [8] * 5
    assert max(len(table) + first for plan in engine.plans for _, first, table in plan.tables) == 2


@two_modes
@pytest.mark.parametrize("size", [1, 3, 8])
def test_kv_12_no_table_outgrows_its_columns(policy, overlap: bool, size: int) -> None:
    """Whatever is accepted never has more than max_model_len tokens nor ceil(max_model_len / block) blocks."""
    for longest in (2, size, size + 1, 2 * size):
        if longest < 2:
            continue
        engine = drive(limits(block_size=size, num_blocks=20, max_model_len=longest), policy, overlap=overlap)
        asked = [
            (prompt, tokens)
            for prompt in sorted({1, 2, longest // 2, longest - 1, longest, longest + 1})
            for tokens in (1, longest - prompt, longest - prompt + 1, None)
            if prompt >= 1 and (tokens is None or tokens >= 1)
        ]
        seqs = [engine.arrive(request(prompt, tokens)) for prompt, tokens in asked]
        engine.drain()
        for seq, (prompt, tokens) in zip(seqs, asked, strict=True):
            length = longest if tokens is None else prompt + tokens
            good = prompt < longest and length <= longest
            assert engine.over[seq].reason == ("length" if good else "rejected")
            assert len(engine.over[seq].tokens) == (length if good else prompt)
        columns = cdiv(longest, size)
        assert all(first + len(table) <= columns for plan in engine.plans for _, first, table in plan.tables)
        assert all(max(ints(plan.context)) < longest for plan in engine.plans)


def test_kv_12_a_state_of_the_past_has_its_tables() -> None:
    """What a later step appends to a table shows in no state before it."""
    hand = Hand.of(limits(max_model_len=8), request(7, 1), request(3, 5))
    past = []
    for _ in range(5):
        past.append((hand.state, digest(hand.state), [blocks_of(hand.state, seq) for seq in (0, 1)]))
        hand.step()
        assert violations(hand.state) == []
    for state, name, tables in past:
        assert digest(state) == name
        assert [blocks_of(state, seq) for seq in (0, 1)] == tables
