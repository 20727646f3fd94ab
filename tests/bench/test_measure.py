"""Decode steps, prefills and mixes, measured on a tiny model on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from agentinfer.bench import measure
from agentinfer.bench.measure import Mix, decode, prefill, requests_of, throughput, times_of
from agentinfer.bench.watch import Profile
from agentinfer.build import Settings
from agentinfer.errors import AgentInferError, InvalidSetting
from agentinfer.loop import Engine, open_engine
from agentinfer.state.policy import reserve
from tiny import write_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Engine:
    return opened(model)


def opened(model: Path, **change: object) -> Engine:
    usual = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "seed": 0}
    return open_engine(model, Settings(device="cpu", **{**usual, **change}))


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of *engine* sampled, from now on."""
    sampled: list[int] = []
    step = Engine.step

    def spy(self: Engine):
        output = step(self)
        sampled.append(0 if output is None else len(output.seqs))
        return output

    monkeypatch.setattr(Engine, "step", spy)
    return sampled


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Callable[[], float]:
    """A clock that goes on by *seconds* at each look."""
    looks = iter(range(10**9))
    monkeypatch.setattr(measure, "clock", lambda: next(looks) * seconds)
    return measure.clock


def test_times() -> None:
    """Times are milliseconds, with the percentiles that numpy interpolates."""
    times = times_of([0.001, 0.002, 0.003, 0.010])
    assert times.each == (1.0, 2.0, 3.0, 10.0)
    assert (times.median, times.mean) == (2.5, 4.0)
    assert (times.p10, times.p90) == (1.3, 7.9)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_decode_times_full_steps_alone(model: Path, monkeypatch: pytest.MonkeyPatch, batch: int, overlap: bool) -> None:
    """Each measured step samples one token a sequence, there are as many as were asked for, and nothing is left."""
    engine = opened(model, overlap=overlap)
    sampled = counted(engine, monkeypatch)
    ticking(monkeypatch, 0.5)
    found = decode(engine, batch, 20, steps=7, warmup=3, runs=2)
    assert found.steps.each == (500.0,) * 14
    assert (found.ms_per_step, found.tokens_per_s, found.runs_ms) == (500.0, batch * 2.0, (500.0, 500.0))
    assert sampled.count(batch) >= 2 * (7 + 3 + 1)
    assert not engine.unfinished
    assert engine.world.state.pool.num_available == 64
    assert 20 + 3 + 3.5 <= found.mean_context <= 20 + 3 + 3.5 + 8


def test_decode_samples_at_the_temperature(engine: Engine) -> None:
    """Decoding at a temperature works as greedy decoding does."""
    assert len(decode(engine, 2, 5, steps=4, warmup=1, runs=1, temperature=0.6).steps.each) == 4


@pytest.mark.parametrize(
    ("batch", "length", "change", "field"),
    [
        (5, 4, {}, "max_num_seqs"),
        (2, 250, {}, "max_model_len"),
        (4, 4, {"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        (4, 60, {"num_blocks": 20}, "num_blocks"),
    ],
)
def test_a_batch_that_can_not_run_together(
    model: Path, batch: int, length: int, change: dict[str, int], field: str
) -> None:
    """A batch that the limits do not admit is refused before anything runs, naming the setting and the need."""
    engine = opened(model, **change)
    with pytest.raises(InvalidSetting, match=r"is \d+; \d sequences of \d+ tokens need \d+") as caught:
        decode(engine, batch, length, steps=4, warmup=1, runs=1)
    assert caught.value.field == field
    assert engine.world.state.step == 0


def test_a_batch_that_does_not_run_together(engine: Engine) -> None:
    """Where the policy keeps a sequence waiting, that is an error and not a number."""

    def one_at_a_time(state):
        return () if len(state.order) else reserve(state)

    engine.machine = evolve(engine.machine, policy=one_at_a_time)
    with pytest.raises(AgentInferError):
        decode(engine, 2, 4, steps=2, warmup=1, runs=1)
    assert not engine.unfinished


def test_a_step_that_fails_is_an_error(model: Path) -> None:
    """Logits that are not finite end the measurement with what the engine said, and leave nothing behind."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] *= 3e38

    engine = opened(write_tiny(model.parent / "poisoned", poison))
    for act in (lambda: prefill(engine, 5), lambda: decode(engine, 2, 5, steps=2), lambda: throughput(engine, few())):
        with pytest.raises(AgentInferError, match="not finite"):
            act()
        assert not engine.unfinished


def few(**change: object) -> Mix:
    return evolve(Mix(6, (3, 30), (1, 12)), **change)


def test_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill is timed from its arrival to its token, chunks and all, never found in the prefix cache."""
    ticking(monkeypatch, 0.25)
    sampled = counted(engine, monkeypatch)
    found = prefill(engine, 40, runs=3)
    assert found.times.each == (250.0,) * 3
    assert found.tokens_per_s == 160.0
    assert sum(sampled) == 4
    assert engine.world.state.step == 4 * 3, "40 tokens are three chunks of 16, each time"
    with pytest.raises(InvalidSetting, match="max_model_len: is 256; 1 sequences of 257 tokens need 257"):
        prefill(engine, 256)


def test_requests_are_those_of_the_seed() -> None:
    """Lengths and ids depend on the seed alone, cover their ranges, and only the ids change from run to run."""
    mix = Mix(300, (3, 7), (2, 4), temperature=0.5, seed=5)
    first, again, other = requests_of(mix, 20_000), requests_of(mix, 20_000), requests_of(mix, 20_000, run=1)
    assert first == again
    assert {len(r.prompt) for r in first} == set(range(3, 8))
    assert {r.params.max_tokens for r in first} == {2, 3, 4}
    assert [(len(r.prompt), r.params) for r in other] == [(len(r.prompt), r.params) for r in first]
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert all(x < 20_000 for r in (*first, *other) for x in r.prompt)
    assert all(x < 96 for r in requests_of(mix, 96, run=2) for x in r.prompt)
    assert all(r.params.ignore_eos and r.params.temperature == 0.5 for r in first)


@pytest.mark.parametrize("overlap", [True, False])
def test_throughput(model: Path, overlap: bool) -> None:
    """Every token of every request is counted, each request has a first token, and steps add up to the time."""
    engine, mix = opened(model, overlap=overlap), few()
    wanted = sum(r.params.max_tokens or 0 for r in requests_of(mix, 96))
    for one in throughput(engine, mix, runs=2):
        assert one.output_tokens == wanted
        assert one.prompt_tokens == sum(len(r.prompt) for r in requests_of(mix, 96))
        assert len(one.first_token.each) == 6
        assert all(np.isfinite(one.first_token.each))
        assert max(one.first_token.each) <= one.total_s * 1e3 + 0.1
        assert len(one.steps.each) == one.num_steps
        assert sum(one.steps.each) <= one.total_s * 1e3 + 0.1
        assert one.tokens_per_s == pytest.approx(wanted / one.total_s, rel=0.01)
    assert not engine.unfinished
    with pytest.raises(InvalidSetting, match="max_model_len"):
        throughput(engine, few(output_tokens=(1, 300)))


@pytest.mark.filterwarnings("ignore:Profiler clears events")
def test_profile(engine: Engine, tmp_path: Path) -> None:
    """A profile is a trace of as many steps as it says, taken after what is measured."""
    for name, act in {
        "decode": lambda p: decode(engine, 2, 5, steps=4, warmup=1, runs=2, profile=p),
        "prefill": lambda p: prefill(engine, 5, runs=1, profile=p),
        "mix": lambda p: throughput(engine, few(output_tokens=(30, 40)), profile=p),
    }.items():
        file = tmp_path / f"{name}.json"
        act(Profile(file, CPU, steps=3))
        names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert "aten::mm" in names or "aten::linear" in names
        assert not engine.unfinished
