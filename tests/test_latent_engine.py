"""The engine over latents and experts: what it does for other models it does for these, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

import deepseeks
from agentinfer.build import Settings
from agentinfer.errors import InvalidSetting
from agentinfer.loop import Engine, Result, generate, open_engine
from agentinfer.memory import memory_plan
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.state.check import violations
from agentinfer.state.engine import digest, tokens_of
from agentinfer.state.event import Event
from agentinfer.state.history import rewind
from agentinfer.state.policy import POLICIES
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.trace import Trace, verify
from agentinfer.steps import prefill_step

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
FIRST = (5, 3, 11, 9, 7, 10)
"""Chosen so that no choice on the way is a near tie."""
PROMPTS = [[first] * (3 * i + 1) + [7, 8, 9] for i, first in enumerate(FIRST)]
MARGIN = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3."""
    return deepseeks.write(tmp_path_factory.mktemp("v3"))


def small(**changes: object) -> Settings:
    """Settings for a tiny pool."""
    base = Settings(block_size=4, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    return evolve(base, **changes)


def naive(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], float]:
    """Greedy tokens by recomputing everything for each token, and the smallest top-2 margin on the way."""
    m, tokens, margin = engine.machine, list(prompt), float("inf")
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    for _ in range(n):
        kv = allocate(layouts, 64, 1, 64, m.ranks.device, float("nan"))
        x, kv = by_hand(kv, [tokens], [0], [list(range(1, 65))])
        logits, kv = prefill_step(m, kv, x)
        best = torch.topk(logits[0], 2).values
        margin = min(margin, float(best[0] - best[1]))
        tokens.append(int(logits[0].argmax()))
        if tokens[-1] in m.limits.eos_ids:
            break
    return tokens[len(prompt) :], margin


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[int, ...]]:
    """What the model says to PROMPTS; all with a margin that no rounding crosses."""
    engine = open_engine(folder, small())
    found = [naive(engine, prompt, 16) for prompt in PROMPTS]
    assert min(margin for _, margin in found) > MARGIN, [margin for _, margin in found]
    assert len({tuple(tokens[-4:]) for tokens, _ in found}) > 3
    return [tuple(tokens) for tokens, _ in found]


def outputs(results: list[Result]) -> list[tuple[int, ...]]:
    """The generated tokens of each."""
    assert all(result.error is None for result in results), results
    return [result.output_ids for result in results]


SHAPES = [
    {},
    {"block_size": 1, "num_blocks": 320},
    {"block_size": 16, "num_blocks": 20},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 3},
    {"max_num_seqs": 3},
    {"prefix_cache": False},
    {"num_blocks": 11},  # one request at a time, and preemption under throughput
]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_do_not_depend_on_how_the_engine_runs(
    folder: Path, answers: list[tuple[int, ...]], shape: dict[str, int], policy: str
) -> None:
    """Greedy tokens are the naive model's, whatever the batch, chunks, blocks, cache or policy; prefixes are hit."""
    engine = open_engine(folder, small(policy=policy, **shape))
    assert {layer.layout.kind for layer in engine.world.device.kv.layers} == {"mla"}
    assert outputs(generate(engine, PROMPTS, GREEDY)) == answers
    again = generate(engine, PROMPTS[::-1], GREEDY)
    assert outputs(again) == answers[::-1]
    if shape.get("prefix_cache", True) and "num_blocks" not in shape:
        assert [r.cached_tokens for r in again] == [(len(p) - 1) // 4 * 4 for p in PROMPTS[::-1]]
    assert violations(engine.world.state) == []
    assert engine.world.state.pool.num_available == engine.machine.limits.num_blocks


def test_fork_shares_and_diverges(folder: Path) -> None:
    """Children share their parent's latents, the partly filled block copied, and equal requests of their own."""
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=5)
    engine = open_engine(folder, small(overlap=False))
    parent = engine.add(Request((3, 1, 4, 1, 5, 9), params))
    assert engine.step() is None  # launched; nothing has landed, so the children start from the prompt
    children = engine.fork(parent, (6, 7))
    results: dict[int, tuple[int, ...]] = {}
    used: list[int] = []
    while engine.unfinished:
        output = engine.step()
        used.append(int((engine.world.state.pool.refs > 0).sum()))
        results.update({done.seq: done.output for done in output.finished} if output else {})
    assert max(used) == 1 + 3 * 2
    for seq, seed in zip((parent, *children), (5, 6, 7), strict=True):
        (alone,) = generate(open_engine(folder, small()), [[3, 1, 4, 1, 5, 9]], evolve(params, seed=seed))
        assert results[seq] == alone.output_ids
    assert len(set(results.values())) > 1
    assert violations(engine.world.state) == []


@pytest.mark.parametrize("overlap", [True, False])
def test_events_replay_to_the_same_states(folder: Path, answers: list[tuple[int, ...]], *, overlap: bool) -> None:
    """A trace of a run over latents replays to the states that the engine was in."""
    engine = open_engine(folder, small(overlap=overlap, num_blocks=24, max_num_batched_tokens=7))
    events: list[tuple[Event, str]] = []
    engine.note = lambda event, state: events.append((event, digest(state)))
    assert outputs(generate(engine, PROMPTS, GREEDY)) == answers
    trace = Trace(engine.machine.limits, "throughput", tuple(e for e, _ in events), tuple(d for _, d in events))
    assert len(events) > 30
    assert verify(trace) is None


def test_a_rewound_sequence_goes_on_where_it_was(folder: Path) -> None:
    """Sent back to waiting twice, a sampled sequence still gives the same tokens."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    (want,) = generate(open_engine(folder, small()), [[1, 2, 3, 4, 5]], params)
    engine = open_engine(folder, small(overlap=False, prefix_cache=False))
    seq = engine.add(Request((1, 2, 3, 4, 5), params))
    done, out = None, {4, 6}
    while done is None:
        output = engine.step()
        done = next((one for one in output.finished if one.seq == seq), None) if output is not None else None
        generated = 0 if done else len(tokens_of(engine.world.state, seq)) - 5
        if generated in out:
            out.discard(generated)
            engine.reset(rewind(engine.world.state, engine.world.state))
    assert not out
    assert done.output == want.output_ids


def test_a_row_that_is_not_finite_ends_alone(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """NaN in one row's latents and routes ends that request with an error; its neighbours keep their tokens."""
    engine = open_engine(folder, small(prefix_cache=False))
    engine.machine.weights.embed[50] = float("nan")
    results = generate(engine, [*PROMPTS[:3], [1, 2, 50], *PROMPTS[3:]], GREEDY)
    assert "not finite" in str(results[3].error)
    assert outputs([*results[:3], *results[4:]]) == answers


def test_what_it_takes_is_planned(folder: Path) -> None:
    """A plan counts latents once a token, on every rank, and all experts."""
    one, two = (memory_plan(folder, memory_gib=4, tp=tp) for tp in (1, 2))
    assert one.kv_per_token == two.kv_per_token == 3 * (16 + 4) * 4
    assert one.num_parameters == sum(x.numel() for x in deepseeks.tensors_of(deepseeks.V3, folder).values())
    assert 0.45 < two.weights / one.weights < 0.6


def test_other_ops_are_refused(folder: Path) -> None:
    """Asked for by name, a provider without latent attention is refused before anything is loaded; so is compile."""
    with pytest.raises(InvalidSetting, match="ops: vllm: no latent attention yet"):
        open_engine(folder, small(ops="vllm"))
    with pytest.raises(InvalidSetting, match=r"compile: .*latent attention"):
        open_engine(folder, small(compile=True))
