"""EngineState as a value: where a sequence is, what it knows, and its name by content."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from agentinfer.state.columns import FIELDS
from agentinfer.state.engine import digest, has_work, initial, live, status, tokens_of
from agentinfer.state.ids import BlockId, Row, SeqId
from agentinfer.state.log import Queue
from engines import Hand, limits, request


def test_a_status_is_derived() -> None:
    """WAITING, PREFILL in chunks, DECODE, FINISHED; an unknown number is a KeyError."""
    hand = Hand.of(limits(max_num_batched_tokens=4))
    seq = SeqId(hand.arrive(request(9, 2)))
    seen = [status(hand.state, seq)]
    for _ in range(4):
        hand.step()
        seen.append(status(hand.state, seq))
    assert seen == ["WAITING", "PREFILL", "DECODE", "DECODE", "FINISHED"]
    with pytest.raises(KeyError):
        status(hand.state, SeqId(1))
    with pytest.raises(KeyError):
        tokens_of(hand.state, seq)
    assert not has_work(hand.state)


def test_the_tokens_from_a_position_on() -> None:
    """From every position the tokens of a waiting or running sequence are the rest of all of them; both are live."""
    hand = Hand.of(limits(max_num_seqs=1), request(6, 9), request(5, 2))
    for _ in range(6):
        for seq in (SeqId(0), SeqId(1)):
            every = tokens_of(hand.state, seq)
            assert [tokens_of(hand.state, seq, i) for i in range(20)] == [every[i:] for i in range(20)]
        assert live(hand.state) == {0, 1}
        hand.step()
    hand.run()
    assert not live(hand.state)


def test_columns_are_read_only() -> None:
    """No column of any state can be written to."""
    hand = Hand.of(limits(), request(9, 9))
    hand.step()
    for state in (initial(limits()), hand.state):
        for name in FIELDS:
            with pytest.raises(ValueError, match="read-only"):
                getattr(state.cols, name)[...] = 0
        with pytest.raises(ValueError, match="read-only"):
            state.pool.refs[0] = 1


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "params"])
def test_a_digest_reads_every_column(name: str) -> None:
    """One number more in one column gives the state another name."""
    hand = Hand.of(limits(), request(9, 9))
    hand.step()
    changed = getattr(hand.state.cols, name).copy()
    changed[1] += 1
    assert digest(evolve(hand.state, cols=evolve(hand.state.cols, **{name: changed}))) != digest(hand.state)


def test_a_digest_reads_queues_and_pool() -> None:
    """Another order of free or cached blocks, of waiting sequences, another content, step or number: another name."""
    hand = Hand.of(limits(max_num_seqs=1, num_blocks=16, max_model_len=33), request(range(9), 1))
    hand.step()
    for i in range(3):
        hand.arrive(request((i, 2), 9))
    hand.step()
    state, pool = hand.state, hand.state.pool
    entries = [entry for entry in pool.lru if pool.cached.get(entry[0]) == entry[1]]
    block, key = next(iter(pool.keys.items()))
    waiting = list(state.waiting)
    others = [
        evolve(state, step=9),
        evolve(state, next_seq=99),
        evolve(state, waiting=Queue.of(waiting[::-1])),
        evolve(state, waiting=Queue.of(waiting[1:]), requeued=(waiting[0],)),
        evolve(state, waiting=Queue.of([evolve(waiting[0], seed=77), *waiting[1:]])),
        evolve(state, order=state.order[:0]),
        evolve(state, rows=(None, None)),
        evolve(state, retabled=((Row(1), 0, (block,)),)),
        evolve(state, limits=evolve(state.limits, max_num_batched_tokens=5)),
        *(
            evolve(state, pool=other)
            for other in (
                evolve(pool, free=Queue.of([*pool.free][::-1])),
                evolve(pool, lru=Queue.of(entries[::-1])),
                evolve(pool, refs=pool.refs + 1),
                evolve(pool, keys=pool.keys.insert(block, evolve(key, hash=key.hash + 1))),
                evolve(pool, keys=pool.keys.insert(block, evolve(key, parent=BlockId(5)))),
                evolve(pool, keys=pool.keys.remove(block)),
            )
        ),
    ]
    names = [digest(other) for other in (state, *others)]
    assert len(entries) == len(waiting) == 2
    assert len(set(names)) == len(names)


def test_equal_histories_have_equal_digests() -> None:
    """Two engines that lived the same have one name; one more arrival gives another."""
    one, two = (Hand.of(limits(), request(9, 9), request(3, 9)) for _ in range(2))
    for hand in (one, two):
        hand.step()
    assert digest(one.state) == digest(two.state)
    two.arrive(request(1, 1))
    assert digest(one.state) != digest(two.state)


def test_sampling_parameters_reach_the_plan() -> None:
    """Each row's own temperature, top-k, top-p, min-p and seed, in the order of the samples."""
    asked = [
        request((1,), 9, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**63 - 1),
        request((2,), 9, temperature=2.0, top_k=-1, seed=0),
    ]
    sampling = Hand.of(limits(), *asked).plan().sampling
    assert sampling.temperature.tolist() == [0.5, 2.0]
    assert sampling.top_k.tolist() == [3, -1]
    assert sampling.top_p.tolist() == [0.25, 1.0]
    assert sampling.min_p.tolist() == [0.125, 0.0]
    assert sampling.seed.tolist() == [2**63 - 1, 0]
    assert np.array_equal(sampling.index, [0, 0])
