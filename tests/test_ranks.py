"""Engines of several ranks: what they compute, that they agree, what they refuse. Ranks are threads here."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

import deepseeks
import tiny
from agentinfer import graphs, scoring, speculative
from agentinfer.build import Settings, build
from agentinfer.errors import AgentInferError, CheckpointError, InvalidRequest
from agentinfer.lead import LOAD_S, Diverged, Lead, follow
from agentinfer.lifeline import Beat, late
from agentinfer.loop import Engine, Result, generate, open_engine, run, start
from agentinfer.models.model import kv_layout, load_model
from agentinfer.ops.comm import Group, Pulse, Ranks, alone, connect, open_store
from agentinfer.ops.inputs import by_hand, remember, stage
from agentinfer.ops.kv import allocate
from agentinfer.ops.parts import choose_parts
from agentinfer.ops.provide import reference
from agentinfer.ops.sample import idle
from agentinfer.ops.threads import Threads
from agentinfer.scoring import score
from agentinfer.speculative import Tally, draft_model
from agentinfer.state.engine import EngineState, digest
from agentinfer.state.plan import Plan
from agentinfer.state.policy import Policy, reserve, throughput
from agentinfer.state.request import Request, SamplingParams
from agentinfer.steps import Device, Flight, Machine, decode_step, in_parts
from agentinfer.swap import swap_weights

SETTINGS = Settings(device="cpu", block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16, seed=7)
PROMPTS = [[1, 2, 3], [5] * 21, [9, 8, 7, 6], [1, 2, 3, 4, 5], [11, 12]]
WORKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("plain", {"temperature": 0.8, "seed": 3}),
    ("filtered", {"temperature": 1.1, "top_p": 0.8, "top_k": 20, "seed": 4}),
)


def params(**how: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "ignore_eos": True, **how})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, and a vocabulary and a width that neither 2 nor 4 divides: both are padded."""
    return tiny.write_tiny(tmp_path_factory.mktemp("ranks"), vocab_size=97, intermediate_size=98)


def gloo(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """*work* of each rank over gloo; the ranks are threads."""
    store = open_store("127.0.0.1", 0, serve=True)

    def one(rank: int) -> Any:
        own = store if rank == 0 else open_store("127.0.0.1", store.port, serve=False)
        pulse = Pulse(deadline_s=30.0)
        return work(connect(own, "test", rank, size, torch.device("cpu"), pulse).group(rank))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def threads(size: int, work: Callable[[Group], Any]) -> list[Any]:
    return Threads.of(size, deadline_s=30.0).run(work)


GROUPS = pytest.mark.parametrize(
    ("kind", "size"),
    [(threads, 2), (threads, 4), (gloo, 2), pytest.param(gloo, 4, marks=pytest.mark.slow)],
    ids=["threads-2", "threads-4", "gloo-2", "gloo-4"],
)


def of(group: Group, *, ep: bool = False) -> Ranks:
    return Ranks(group, ep=ep, device=torch.device("cpu"))


@GROUPS
def test_logits_are_those_of_one_rank(folder: Path, size: int, kind: Callable[..., list[Any]]) -> None:
    """A cut model gives the logits of the whole one within 1e-4 on every rank, chunked and decoding."""

    def logits(shared: Ranks) -> torch.Tensor:
        model, weights = load_model(folder, torch.float32, shared)
        kv = allocate(kv_layout(model, shared.tp.size, 4), 32, 4, 16, shared.device)
        found = []
        for ids, first in (([[3, 1, 4, 1, 5], [9, 2, 6]], [0, 0]), ([[5], [3, 5]], [5, 3])):
            x, kv = by_hand(kv, ids, first, [[1, 2, 3], [4, 5]])
            each, kv = model.forward(model.config, weights, reference(), shared, kv, x)
            found.append(each)
        return torch.cat(found)

    want = logits(alone())
    assert want.shape[1] == 97
    for got in kind(size, lambda group: logits(of(group))):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def watched(policy: Policy, digests: list[str]) -> Policy:
    """*policy*, which notes the digest of each state that it is asked about."""

    def ask(state: EngineState) -> Any:
        digests.append(digest(state))
        return policy(state)

    return ask


def together(
    folder: Path,
    size: int,
    kind: Callable[..., list[Any]],
    drive: Callable[[Engine], Any],
    settings: Settings = SETTINGS,
    follower: Policy = throughput,
    change: Callable[[Machine], Machine] = lambda m: m,
    weights: Callable[[], Any] | None = None,
) -> tuple[Any, list[list[str]]]:
    """What *drive* makes of rank 0's engine, and the digests of the states of each rank, one a step."""
    lines: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
    digests: list[list[str]] = [[] for _ in range(size)]

    def tell(turn: Any) -> None:
        for line in lines[1:]:
            line.put(json.dumps(turn))

    def hear(rank: int) -> Iterator[Any]:
        while True:
            turn = json.loads(lines[rank].get(timeout=30))
            if turn is None:
                return
            yield turn

    def work(group: Group) -> Any:
        policy = watched(follower if group.rank else throughput, digests[group.rank])
        machine, device = build(folder, settings, (), policy, ranks=of(group, ep=settings.ep))
        machine = change(machine)
        if group.rank:
            return digest(follow(machine, device, hear(group.rank), Pulse(), weights))
        engine = start(machine, device)
        lead = Lead(tell, Pulse())
        engine.lead, engine.others = lead, lead.beside
        try:
            result = drive(engine)
        except BaseException:
            tell(None)
            raise
        tell({"end": digest(engine.world.state), "events": lead.waiting})
        return result

    return kind(size, work)[0], digests


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[Result]]:
    """What one rank answers."""
    return {name: generate(open_engine(folder, SETTINGS), PROMPTS, params(**how)) for name, how in WORKS}


@GROUPS
@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_fold_the_same_states_and_answer_as_one(
    folder: Path, wanted: dict[str, list[Result]], size: int, kind: Callable[..., list[Any]], overlap: bool
) -> None:
    """Tokens are those of one rank for each way to sample, and the state has one digest on all ranks at each step."""
    settings = evolve(SETTINGS, overlap=overlap)

    def drive(engine: Engine) -> Any:
        return {name: generate(engine, PROMPTS, params(**how)) for name, how in WORKS}

    found, digests = together(folder, size, kind, drive, settings)
    for name, _ in WORKS:
        assert [r.output_ids for r in found[name]] == [r.output_ids for r in wanted[name]], name
    steps = [[name for i, name in enumerate(each) if not i or name != each[i - 1]] for each in digests]
    assert all(len(each) > 30 for each in steps)
    for other in steps[1:]:
        assert [name for name in steps[0] if name in set(other)] == other


@GROUPS
def test_experts_spread_over_ranks_answer_as_one(tmp_path: Path, size: int, kind: Callable[..., list[Any]]) -> None:
    """Whole experts on each rank change no token."""
    folder, settings = deepseeks.write(tmp_path), evolve(SETTINGS, ep=True)

    def drive(engine: Engine) -> Any:
        return {name: generate(engine, PROMPTS, params(**how)) for name, how in WORKS}

    want = drive(open_engine(folder, SETTINGS))
    found, _ = together(folder, size, kind, drive, settings)
    for name, _ in WORKS:
        assert [r.output_ids for r in found[name]] == [r.output_ids for r in want[name]], name


@pytest.mark.parametrize("overlap", [True, False])
def test_what_graphs_of_ranks_can_not_choose_is_chosen_after_them(folder: Path, overlap: bool) -> None:
    """A stand-in for captured graphs, which leave logits cut over the ranks and heed no filters: rows with filters,
    edits or log-probabilities are chosen from all logits, beside rows without, as one rank chooses them.
    """
    settings, replayed = evolve(SETTINGS, overlap=overlap), list[int]()

    def replaying(m: Machine) -> Machine:
        def replay(device: Device, plan: Plan) -> tuple[Flight, Device] | None:
            rows = len(plan.rows)
            if not rows == len(plan.samples) == len(plan.slots) or plan.scored is not None:
                return None
            x, kv = stage(plan, device.kv, device.last)
            logits_SV, kv = decode_step(in_parts(m), kv, x)
            places = np.random.default_rng(plan.step).permutation(rows).astype(np.int32)
            logits = torch.full((rows + 3, logits_SV.shape[1]), float("nan"))
            logits[:rows] = logits_SV[torch.from_numpy(places).long()]
            left = graphs.left_of(m, plan)
            asked = idle(plan.sampling, sum(left, ()))
            chosen = torch.zeros((2, rows + 3), dtype=torch.int64)
            chosen[:, :rows] = choose_parts(None, logits_SV, asked, m.ranks.tp, m.limits.vocab_size)
            device = Device(kv, remember(device.last, x, chosen[0, :rows]), device.edits)
            replayed.append(rows)
            return graphs._after(m, logits, chosen, device, plan, places, *left)

        return evolve(m, replay=replay)

    how = [
        params(**WORKS[1][1]), params(**WORKS[2][1]), params(temperature=0.0, logit_bias={5: 3.0}, frequency_penalty=1),
        params(temperature=1.0, seed=5, min_p=0.05, bad_words=[(7, 8)]), params(temperature=0.0, logprobs=3),
    ]  # fmt: skip

    def drive(engine: Engine) -> Any:
        results = generate(engine, PROMPTS, how)
        judged = [(said.rank, said.top_ids) for r in results for said in r.outputs[0].logprobs or ()]
        return [r.output_ids for r in results], judged

    want = drive(open_engine(folder, settings))
    assert len(want[1]) == 9
    assert together(folder, 2, threads, drive, settings, change=replaying)[0] == want
    assert max(replayed) == 4


def test_aborts_forks_and_preemption_reach_all_ranks(folder: Path) -> None:
    """What clients do between steps, and a pool that is too small, leave all ranks with one state."""
    settings = evolve(SETTINGS, num_blocks=10)

    def drive(engine: Engine) -> list[int]:
        seqs = [engine.add(Request(tuple(prompt), params(temperature=1.0))) for prompt in PROMPTS]
        ends: list[int] = []
        for turn in range(200):
            if not engine.unfinished:
                break
            if turn == 3:
                engine.abort(seqs[2], "enough")
                engine.fork(seqs[0], (5, 6))
            output = engine.step()
            ends += [done.seq for done in output.finished] if output is not None else []
        return sorted(ends)

    ends, _ = together(folder, 2, threads, drive, settings)
    assert ends == list(range(7))


@pytest.mark.parametrize("rejection", [False, True])
def test_drafts_reach_all_ranks(folder: Path, wanted: dict[str, list[Result]], rejection: bool) -> None:
    """Rank 0 alone guesses, and judges; all verify the same plan, and the tokens are those of one rank."""
    sizes = evolve(SETTINGS, max_model_len=64)

    def drive(engine: Engine) -> Any:
        tally = Tally()
        engine.note = tally
        propose = draft_model(open_engine(folder, sizes), 3, rejection=rejection)
        found = {name: speculative.generate(engine, PROMPTS, params(**how), propose=propose) for name, how in WORKS}
        return found, tally

    (found, tally), digests = together(folder, 2, threads, drive, sizes)
    for name, _ in WORKS:
        assert [r.output_ids for r in found[name]] == [r.output_ids for r in wanted[name]], name
    assert 50 < tally.accepted == tally.drafts
    assert set(digests[1]) <= set(digests[0])


@GROUPS
def test_scores_are_those_of_one_rank(folder: Path, size: int, kind: Callable[..., list[Any]]) -> None:
    """Log-probabilities, ranks and alternatives, in the middle of a run, in one pass and in many; nothing else is
    changed by them.
    """
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(60)), [96, 95, 0]]

    def drive(engine: Engine) -> Any:
        seqs = [engine.add(Request(tuple(prompt), params(temperature=0.7, seed=5))) for prompt in PROMPTS]
        for _ in range(4):
            engine.step()
        found = score(engine, texts, top=5)
        ends = {done.seq: done.output for done in run(engine, seqs)}
        return found + score(engine, texts[:1]), [ends[seq] for seq in seqs]

    want, outputs = drive(open_engine(folder, SETTINGS))
    (got, told), digests = together(folder, size, kind, drive)
    assert told == outputs
    assert set(digests[1]) <= set(digests[0])
    assert [len(one.logprobs) for one in got] == [7, 0, 59, 2, 7]
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, atol=1e-5)
        np.testing.assert_array_equal(mine.ranks, theirs.ranks)
        np.testing.assert_array_equal(mine.top_ids, theirs.top_ids)


def test_what_can_not_be_scored_is_refused_before_the_others_hear_of_it(folder: Path) -> None:
    """A token that is none leaves all ranks as they were."""

    def drive(engine: Engine) -> Any:
        with pytest.raises(InvalidRequest, match="token id 97"):
            score(engine, [[97, 1]])
        return [r.output_ids for r in generate(engine, PROMPTS, params())]

    assert together(folder, 2, threads, drive)[0] == drive(open_engine(folder, SETTINGS))


def test_a_score_that_is_interrupted_can_not_be_gone_on_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The others have begun it: what comes next is refused, by name, instead of hanging."""
    judge = scoring.judge

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def drive(engine: Engine) -> None:
        monkeypatch.setattr(scoring, "judge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score(engine, [[1, 2, 3]])
        monkeypatch.setattr(scoring, "judge", judge)
        for again in (lambda: score(engine, [[1, 2]]), lambda: generate(engine, PROMPTS, params())):
            with pytest.raises(AgentInferError, match="score: it was interrupted, but other ranks have begun it"):
                again()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        together(folder, 2, threads, drive)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `folder` with other weights."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, x in tensors.items():
            if x.dim() == 2:
                x.add_(0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))))

    return tiny.write_tiny(tmp_path_factory.mktemp("trained"), change, vocab_size=97, intermediate_size=98)


@GROUPS
@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_reach_all_ranks(
    folder: Path, trained: Path, size: int, kind: Callable[..., list[Any]], recompute: bool
) -> None:
    """From a folder, in the middle of a run: tokens, versions and scores are those of one rank, more than once."""

    def drive(engine: Engine) -> Any:
        found: list[Any] = []
        for version, source in enumerate((trained, folder, str(trained)), 1):
            seqs = [engine.add(Request(tuple(prompt), params())) for prompt in PROMPTS]
            for _ in range(4):
                engine.step()
            assert swap_weights(engine, source, recompute=recompute) == version
            found += [np.round(one.logprobs, 4).tolist() for one in score(engine, PROMPTS)]
            ends = {done.seq: done for done in run(engine, seqs)}
            found += [(ends[seq].output, ends[seq].versions) for seq in seqs]
        return found

    want = drive(open_engine(folder, SETTINGS))
    got, digests = together(folder, size, kind, drive)
    assert got == want
    assert set(digests[1]) <= set(digests[0])


def test_each_rank_gives_its_own_tensors(folder: Path, trained: Path) -> None:
    """Where rank 0 swaps to tensors, the others are asked for theirs."""
    tensors = load_file(trained / "model.safetensors")

    def drive(engine: Engine) -> Any:
        swap_weights(engine, tensors)
        return [r.output_ids for r in generate(engine, PROMPTS, params())]

    want = [r.output_ids for r in generate(open_engine(trained, SETTINGS), PROMPTS, params())]
    assert together(folder, 2, threads, drive, weights=lambda: tensors)[0] == want


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (1, None, r"^rank 1: has no weights of its own"),
        (1, dict, r"^rank 1: .*missing"),
        (0, None, r"^the tensors are not .*missing"),
        ("nowhere", None, r"^(?!rank).*nowhere"),
    ],
)
def test_weights_that_one_rank_does_not_have_are_taken_by_none(
    folder: Path, trained: Path, mine: int | str, theirs: Callable[[], Any] | None, said: str
) -> None:
    """Whose are wrong is said, and all go on as they were."""
    source = mine if isinstance(mine, str) else load_file(trained / "model.safetensors") if mine else {}

    def drive(engine: Engine) -> Any:
        with pytest.raises(CheckpointError, match=said):
            swap_weights(engine, source)
        assert engine.world.state.version == 0
        return [r.output_ids for r in generate(engine, PROMPTS, params())]

    want = [r.output_ids for r in generate(open_engine(folder, SETTINGS), PROMPTS, params())]
    assert together(folder, 2, threads, drive, weights=theirs)[0] == want


def test_who_waits_for_weights_is_patient() -> None:
    """To read a checkpoint takes longer than a step may; afterwards steps have their own deadline again."""
    pulse, told = Pulse(deadline_s=5.0), list[Any]()
    lead = Lead(told.append, pulse)
    with lead.beside({"weights": None}):
        assert pulse.deadline_s == LOAD_S
    with lead.beside({"score": []}):
        assert pulse.deadline_s == 5.0
    assert told == [{"weights": None}, {"score": []}]


def test_a_rank_that_plans_otherwise_is_named(folder: Path) -> None:
    """Rank and step stand in the error when a plan is not rank 0's."""
    with pytest.raises(Diverged, match=r"rank 1 diverged in step [1-9]\d*: its plan"):
        together(folder, 2, threads, lambda engine: generate(engine, PROMPTS, params()), follower=reserve)


def test_a_rank_with_other_tokens_is_named(folder: Path) -> None:
    """Rank and step stand in the error when the tokens that landed are not rank 0's."""
    machine, device = build(folder, SETTINGS, ())
    turns: list[Any] = []
    engine = start(machine, device)
    engine.lead = Lead(turns.append, Pulse())
    generate(engine, PROMPTS[:1], params(max_tokens=5))
    turns[3]["events"][0]["tokens"] ^= 1
    again, device = build(folder, SETTINGS, ())
    with pytest.raises(Diverged, match=r"rank 0 diverged in step [12]: its tokens"):
        follow(again, device, iter(turns), Pulse())


def test_what_an_engine_of_several_ranks_can_not_do(folder: Path) -> None:
    """A rewound state and a step that was interrupted are refused: the others have gone on."""

    def drive(engine: Engine) -> None:
        with pytest.raises(AgentInferError, match="can not be reset"):
            engine.reset(engine.world.state)
        generate(engine, PROMPTS[:1], params(max_tokens=2))
        engine.lead.step += 10
        with pytest.raises(AgentInferError, match="was interrupted, but other ranks"):
            generate(engine, PROMPTS[:1], params(max_tokens=2))
        engine.lead.waiting.clear()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        together(folder, 2, threads, drive)


def test_who_is_behind_is_blamed() -> None:
    """Of ranks that wait too long, the one that came to the fewest steps and collectives is named."""
    waits, behind = Beat(step=5, calls=90, waited_s=12.0), Beat(step=5, calls=70)
    assert late({0: waits, 1: waits, 2: behind}, 10.0).startswith("rank 2 keeps rank 0 waiting")
    assert late({0: behind, 1: waits}, 10.0).startswith("rank 0 keeps rank 1 waiting")
    assert late({0: waits, 1: waits}, 10.0).startswith("collective 90 of step 5, in which all ranks are,")
    assert late({0: waits, 1: behind}, 20.0) == late({0: behind, 1: behind}, 0.0) == ""
