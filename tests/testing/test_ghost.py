"""The ghost device must notice: each way in which a plan can be wrong, one by one, is a Fault in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from agentinfer.state.ids import BlockId, Row
from agentinfer.state.plan import Plan, Told
from agentinfer.testing import Drive, Fault, GhostDevice
from engines import drive, limits, request


def start() -> tuple[Drive, Plan]:
    """An engine whose next plan decodes one row, begins another prompt and samples the first, not launched yet."""
    engine = drive(limits(max_num_batched_tokens=8, max_num_seqs=4))
    engine.arrive(request((10, 11, 12, 13, 14), 9, min_tokens=4, stop_token_ids=(7,), presence_penalty=0.5))
    engine.step()
    engine.step()
    engine.arrive(request(range(20, 32), 9))
    assert engine.flight is not None
    engine._settle(engine.flight, None, fails=False)
    engine.flight = None
    plan = engine._schedule()
    assert plan is not None
    return engine, plan


def column(plan: Plan, name: str, i: int, value: int) -> Plan:
    """*plan* with another number in one column."""
    changed = getattr(plan, name).copy()
    changed[i] = value
    return evolve(plan, **{name: changed})


def sampling(plan: Plan, **changes: object) -> Plan:
    """*plan* with other sampling columns."""
    return evolve(plan, sampling=evolve(plan.sampling, **changes))


def params(plan: Plan, name: str, value: float) -> Plan:
    """*plan* with another sampling parameter."""
    changed = plan.sampling.params.copy()
    changed[name] = value
    return sampling(plan, params=changed)


WRONG: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "nobody": (
        lambda p: evolve(p, rows=p.rows[:0], seqs=p.seqs[:0], start=p.start[:0], count=p.count[:0]),
        "runs nobody",
    ),
    "lengths": (lambda p: evolve(p, seqs=p.seqs[:1]), "unequal length"),
    "row twice": (lambda p: column(p, "rows", 1, p.rows[0]), "runs a row twice"),
    "sequence twice": (lambda p: column(p, "seqs", 1, p.seqs[0]), "runs a sequence twice"),
    "row 0": (lambda p: column(p, "rows", 1, 0), "runs rows"),
    "row beyond": (lambda p: column(p, "rows", 1, 5), "runs rows"),
    "nothing": (lambda p: column(p, "count", 0, 0), "for nothing"),
    "budget": (lambda p: column(p, "count", 1, 9), "positions"),
    "slots": (lambda p: evolve(p, slots=p.slots[1:]), "slots for"),
    "context": (lambda p: column(p, "context", 0, 3), "attend to"),
    "slot twice": (lambda p: column(p, "slots", 1, p.slots[0]), "writes a slot twice"),
    "sink": (lambda p: column(p, "slots", 1, 2), "into the sink"),
    "no sample": (
        lambda p: sampling(
            evolve(p, samples=p.samples[:0], sample_rows=p.sample_rows[:0]),
            params=p.sampling.params[:0],
            index=p.sampling.index[:0],
            banned=(),
        ),
        "does not sample the last chunk",
    ),
    "wrong sample": (lambda p: column(p, "samples", 0, 1), "samples positions"),
    "chunk sampled": (
        lambda p: sampling(
            evolve(p, samples=np.array([0, 7]), sample_rows=np.array([0, 1])),
            params=p.sampling.params.repeat(2),
            index=p.sampling.index.repeat(2),
        ),
        "a chunk that is not the last",
    ),
    "sampling columns": (lambda p: sampling(p, index=p.sampling.index[:0]), "sampling columns"),
    "index": (lambda p: sampling(p, index=p.sampling.index + 1), "has index"),
    "seed": (lambda p: params(p, "seed", 5), "has seed"),
    "temperature": (lambda p: params(p, "temperature", 0.5), "has temperature"),
    "top_k": (lambda p: params(p, "top_k", 3), "has top_k"),
    "top_p": (lambda p: params(p, "top_p", 0.5), "has top_p"),
    "min_p": (lambda p: params(p, "min_p", 0.5), "has min_p"),
    "not banned": (lambda p: sampling(p, banned=()), "may not choose"),
    "banned too much": (lambda p: sampling(p, banned=((0, (7, 8)),)), "may not choose"),
    "banned for whom": (lambda p: sampling(p, banned=((1, (7,)),)), "bans tokens"),
    "not edited": (lambda p: evolve(p, edits=()), "is to be edited"),
    "edited twice": (lambda p: evolve(p, edits=p.edits * 2), "is to be edited"),
    "another row edited": (lambda p: evolve(p, edits=(evolve(p.edits[0], row=Row(2)),)), "is to be edited"),
    "told again": (
        lambda p: evolve(p, told=(Told(Row(1), p.edits[0].request, p.edits[0].request.prompt),)),
        "the device knows",
    ),
    "input": (lambda p: column(p, "inputs", 0, 999), "is given token 999"),
    "input of the prompt": (lambda p: column(p, "inputs", 3, 999), "is given token 999"),
    "needless -1": (lambda p: column(p, "inputs", 0, -1), "is given token -1"),
    "base": (lambda p: evolve(p, base=7), "tables of step 7"),
    "no tables": (lambda p: evolve(p, tables=()), "the device was told"),
    "table gap": (lambda p: evolve(p, tables=tuple((r, f + 1, b) for r, f, b in p.tables)), "table entries"),
    "table of row 9": (lambda p: evolve(p, tables=((9, 0, (BlockId(3),)),)), "gives blocks to row 9"),
    "no such block": (lambda p: evolve(p, tables=tuple((r, f, (99,) * len(b)) for r, f, b in p.tables)), "block 99"),
    "wrong slot": (lambda p: column(p, "slots", 0, p.slots[0] + 1), "its table says"),
    "shared write": (lambda p: column(p, "slots", 2, p.slots[0] + 1), "hold"),
    "cached write": (lambda p: column(p, "slots", 0, 4), "which the prefix cache knows"),
    "skipped": (lambda p: column(column(p, "start", 1, 1), "context", 1, 8), "never written"),
    "copies twice": (
        lambda p: evolve(p, copies=((1, p.tables[-1][2][-1]), (2, p.tables[-1][2][-1]))),
        "copies to blocks",
    ),
    "copy to nobody": (lambda p: evolve(p, copies=((BlockId(1), BlockId(9)),)), "not one sequence's own"),
    "stranger": (lambda p: column(p, "seqs", 1, 55), "not its row"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_a_fault(case: str) -> None:
    """One thing wrong in a plan stops the ghost with words that name it; the plan itself runs."""
    wrong, words = WRONG[case]
    engine, plan = start()
    with pytest.raises(Fault, match=words):
        engine.ghost.launch(wrong(plan), engine.state)
    engine, plan = start()
    engine.flight = engine._launch(plan, fails=False)
    engine.drain()


def test_tokens_of_a_flight_are_hidden() -> None:
    """What launch returns has a plan and nothing else to look at; land gives one token a sample."""
    engine, plan = start()
    flight = engine.ghost.launch(plan, engine.state)
    assert flight is not None
    assert [name for name in dir(flight) if not name.startswith("_")] == ["plan"]
    assert len(engine.ghost.land(flight).tokens) == len(plan.samples) == 1


def test_a_failed_step_leaves_rubbish_that_nobody_may_read() -> None:
    """After a launch that failed its slots are poison, and the device holds the tables it held before."""
    engine, plan = start()
    held = engine.ghost.holds
    assert engine.ghost.launch(plan, engine.state, fails=True) is None
    assert engine.ghost.holds == held
    slots = plan.slots.tolist()
    assert all(engine.ghost.kv[slot].print == -1 for slot in slots)
    again = column(evolve(plan, step=plan.step + 1, base=held), "start", 1, 1)
    with pytest.raises(Fault, match=r"position 0 .* rubbish"):
        engine.ghost.launch(column(again, "context", 1, 8))


def test_a_bad_sample_spoils_what_was_built_on_it() -> None:
    """A row that is not finite is not ok, and the slots of its step are poison; other rows are not touched."""
    engine, plan = start()
    flight = engine.ghost.launch(plan, engine.state)
    assert flight is not None
    result = engine.ghost.land(flight, bad=(0,))
    assert result.ok.tolist() == [False]
    assert [engine.ghost.kv[slot].print == -1 for slot in plan.slots.tolist()] == [True] + [False] * 7


def test_a_position_beyond_the_table_is_a_fault() -> None:
    """With a table of two blocks of four, position 8 can not be run."""
    engine = drive(limits())
    engine.arrive(request(9, 2))
    plan = engine._schedule()
    assert plan is not None
    ghost = GhostDevice(engine.limits)
    ghost.scripts = engine.ghost.scripts
    with pytest.raises(Fault, match="position 8 of sequence 0 lies beyond the 2 blocks"):
        ghost.launch(evolve(plan, tables=((1, 0, (BlockId(1), BlockId(2))),)))
    ghost = GhostDevice(engine.limits)
    ghost.scripts = engine.ghost.scripts
    for row, first, blocks in plan.tables:
        assert (row, first, len(blocks)) == (1, 0, 3)
    assert ghost.launch(plan) is not None


def test_copies_are_gathered_before_they_are_scattered() -> None:
    """Copying 1 to 2 and 2 to 3 at once moves both contents by one; an unwritten slot stays unwritten."""
    engine, plan = start()
    before = dict(engine.ghost.kv)
    size = engine.limits.block_size
    engine.ghost._copy(evolve(plan, copies=((1, 2), (2, 3))))
    for target, source in ((2, 1), (3, 2)):
        for i in range(size):
            assert engine.ghost.kv.get(target * size + i) == before.get(source * size + i)


def test_complete_tables_replace_all() -> None:
    """A plan with base -1 is taken whatever the device holds, and clears what it held."""
    engine, plan = start()
    engine.ghost.holds = 55
    engine.ghost.tables[4] = [1, 2, 3]
    with pytest.raises(Fault, match="the device holds those of 55"):
        engine.ghost.launch(plan, engine.state)
    engine.flight = engine._launch(plan, fails=False)
    assert sorted(engine.ghost.tables) == [1, 2]
    engine.drain()


def test_the_model_depends_on_prefix_seed_and_index() -> None:
    """Other tokens before, another seed, index or salt: each gives another choice somewhere, the same the same."""
    from agentinfer.testing.oracle import choose, prints

    at = [prints(salt, tokens)[-1] for salt in (None, "a") for tokens in ((1, 2), (2, 1), (1, 2, 2))]
    assert len(set(at)) == len(at)
    chosen = [tuple(choose(p, seed, i, (), 16) for i in range(20)) for p in at for seed in (0, 1)]
    assert len(set(chosen)) == len(chosen)
    assert set(np.concatenate([np.array(c) for c in chosen]).tolist()) == set(range(8))
    assert choose(at[0], 0, 0, range(15), 16) == 15
    with pytest.raises(ValueError, match="every token"):
        choose(at[0], 0, 0, range(16), 16)
