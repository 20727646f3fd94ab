"""New weights for an engine that runs: what is sampled by which, what the cache may keep, and that a trace agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from agentinfer.build import Settings
from agentinfer.errors import CheckpointError
from agentinfer.loop import Engine, generate, open_engine, run, stream
from agentinfer.models.weights import tree_leaves
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.ops.sample import choose, survivors
from agentinfer.state.check import violations
from agentinfer.state.engine import digest
from agentinfer.state.event import Event, Swapped
from agentinfer.state.history import rewind
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.trace import Trace, decode_event, encode_event, verify
from agentinfer.steps import prefill_step
from agentinfer.swap import swap_weights
from models import tiny
from tiny import write_tiny

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1], list(range(20, 50))]
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, logprobs=0)


def altered(tensors: dict[str, torch.Tensor]) -> None:
    """Weights of a later day."""
    for name, x in tensors.items():
        if x.dim() == 2:
            x.add_(0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint, and one of the same model after some training."""
    return write_tiny(tmp_path_factory.mktemp("old")), write_tiny(tmp_path_factory.mktemp("new"), altered)


def small(folder: Path, **changes: Any) -> Engine:
    """A small engine."""
    base = Settings(block_size=4, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    return open_engine(folder, evolve(base, **changes))


def outputs(engine: Engine, prompts: Any = PROMPTS) -> list[tuple[int, ...]]:
    """What each is answered, by default."""
    return [result.output_ids for result in generate(engine, prompts, PARAMS)]


def test_an_idle_engine_answers_as_a_fresh_one_of_the_new_weights(folders: tuple[Path, Path]) -> None:
    """From a folder, from tensors by name and from another engine's weights; nothing cached is found any more."""
    old, new = folders
    engine, want = small(old), outputs(small(new))
    assert outputs(engine) != want
    where = [leaf.data_ptr() for leaf in tree_leaves(engine.machine.weights)]
    tensors = load_file(new / "model.safetensors")
    for i, source in enumerate((new, str(old), tensors, small(old).machine.weights, small(new).machine.weights)):
        assert swap_weights(engine, source) == i + 1
        results = generate(engine, PROMPTS, PARAMS)
        assert [result.cached_tokens for result in results] == [0, 0, 0]
        assert {one.versions for result in results for one in result.outputs} == {((0, i + 1),)}
        fresh = small(old if i in (1, 3) else new)
        assert [result.output_ids for result in results] == outputs(fresh)
        assert generate(engine, PROMPTS[2:], PARAMS)[0].cached_tokens == 28, "the new version's KV is found"
    assert [leaf.data_ptr() for leaf in tree_leaves(engine.machine.weights)] == where


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_runs_goes_on_and_says_who_sampled_what(
    folders: tuple[Path, Path], *, overlap: bool, recompute: bool
) -> None:
    """Tokens before are the old model's; after it, with KV computed anew, those of the new model given them."""
    old, new = folders
    engine, before = small(old, overlap=overlap), outputs(small(old))
    seqs = [engine.add(Request(tuple(prompt), PARAMS)) for prompt in PROMPTS]
    for _ in range(5):
        engine.step()
    assert swap_weights(engine, new, recompute=recompute) == 1
    state = engine.world.state
    assert violations(state) == []
    ends = {done.seq: done for done in run(engine, seqs)}
    for seq, prompt, said in zip(seqs, PROMPTS, before, strict=True):
        done = ends[seq]
        (_, zero), (at, one) = done.versions
        count = at - len(prompt)
        assert (zero, one, len(done.output), len(done.logprobs or ())) == (0, 1, 12, 12)
        assert 0 < count < 12
        assert done.output[:count] == said[:count]
        assert done.output != said
        if recompute:
            assert done.output == continued(new, prompt, done.output[:count])
    assert violations(engine.world.state) == []
    assert engine.world.state.pool.num_available == 80
    results = generate(engine, PROMPTS, PARAMS)
    assert [result.output_ids for result in results] == outputs(small(new)), "old KV is not found"


def continued(folder: Path, prompt: list[int], known: tuple[int, ...]) -> tuple[int, ...]:
    """The whole output of the model in *folder* that has said *known* already."""
    engine, tokens = small(folder), list(known)
    while len(tokens) < 12:
        tokens.append(sampled(engine, [*prompt, *tokens], len(tokens)))
    return tuple(tokens)


def sampled(engine: Engine, tokens: list[int], index: int) -> int:
    """What a sequence of PARAMS samples after *tokens*, its output *index*."""
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    x, kv = by_hand(allocate(layouts, 40, 1, 40, torch.device("cpu")), [tokens], [0], [list(range(1, 41))])
    logits = prefill_step(engine.machine, kv, x)[0][0].numpy().astype(np.float32)
    return choose(*survivors(logits, 1.0), 4, index)


def test_stale_blocks_are_neither_found_nor_shared(folders: tuple[Path, Path]) -> None:
    """A request with the prompt of one that began before, and a fork of that one, compute all of it anew."""
    old, new = folders
    engine = small(old)
    parent = engine.add(Request(tuple(PROMPTS[2]), evolve(PARAMS, max_tokens=40)))
    for _ in range(4):
        engine.step()
    swap_weights(engine, new)
    (child,) = engine.fork(parent)
    twin = engine.add(Request(tuple(PROMPTS[2]), PARAMS))
    engine.step()  # gives what had landed for the swap
    engine.step()
    plan = engine.world.state.last
    assert plan is not None
    assert dict(zip(plan.seqs.tolist(), plan.start.tolist(), strict=True))[child] == 0
    ends = {done.seq: done for done in run(engine, [parent, child, twin])}
    assert ends[twin].output == outputs(small(new), PROMPTS[2:])[0]
    assert ends[twin].cached == 0
    assert [version for _, version in ends[child].versions] == [0, 1]


def test_a_trace_with_swaps_replays(folders: tuple[Path, Path]) -> None:
    """Every state comes again without weights; the event is data; a policy under pressure changes nothing of that."""
    engine, events, digests = small(folders[0], num_blocks=12), list[Event](), list[str]()

    def note(event: Event, state: Any) -> None:
        events.append(event)
        digests.append(digest(state))
        assert violations(state) == []

    engine.note = note
    seqs = [engine.add(Request(tuple(prompt), PARAMS)) for prompt in PROMPTS]
    for i in range(6):
        for _ in range(3):
            engine.step()
        swap_weights(engine, folders[1 - i % 2], recompute=i == 3)
    assert len(list(run(engine, [seq for seq in seqs if seq in alive(engine)]))) > 0
    assert verify(Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))) is None
    swapped = [event for event in events if isinstance(event, Swapped)]
    assert [event.recompute for event in swapped] == [False, False, False, True, False, False]
    assert [decode_event(encode_event(event)) for event in swapped] == swapped


def alive(engine: Engine) -> set[int]:
    """The sequences that have not ended."""
    state = engine.world.state
    return {run.seq for run in state.rows if run is not None} | {w.seq for w in (*state.requeued, *state.waiting)}


def test_a_stream_goes_on_over_a_swap(folders: tuple[Path, Path]) -> None:
    """Nothing of a stream is lost or told twice, and what had landed for it is kept."""
    old, new = folders
    engine, got, result = small(old), list[int](), None
    for i, delta in enumerate(stream(engine, PROMPTS[0], PARAMS)):
        got += delta.token_ids
        result = delta.result
        if i == 3:
            swap_weights(engine, new)
    assert result is not None
    assert tuple(got) == result.output_ids
    assert len(got) == 12
    assert [version for _, version in result.outputs[0].versions] == [0, 1]


def test_a_rewind_does_not_bring_old_weights_back(folders: tuple[Path, Path]) -> None:
    """What waits again from before a swap is sampled by the new version from there on."""
    engine = small(folders[0], overlap=False)
    seq = engine.add(Request(tuple(PROMPTS[0]), PARAMS))
    for _ in range(4):
        engine.step()
    early = engine.world.state
    swap_weights(engine, folders[1])
    engine.reset(rewind(early, engine.world.state))
    assert engine.world.state.version == 1
    (done,) = run(engine, [seq])
    assert [version for _, version in done.versions] == [0, 1]


def test_tensors_of_transformers_are_taken_by_their_keys(tmp_path: Path) -> None:
    """A trainer's state_dict, tied head and all, in another dtype and with gradients."""
    one, two = tiny.make("qwen2-tied-yarn", tmp_path / "one"), tiny.make("qwen2-tied-yarn", tmp_path / "two")
    engine = small(one.folder, num_blocks=30)
    tensors = load_file(two.folder / "model.safetensors")
    scaled = {name: (x * 1.25).double().requires_grad_() for name, x in tensors.items()}
    first = outputs(engine, PROMPTS[:2])
    swap_weights(engine, {**scaled, "lm_head.weight": scaled["model.embed_tokens.weight"]})
    assert outputs(engine, PROMPTS[:2]) != first
    embed = engine.machine.weights.embed
    assert torch.equal(embed[: len(tensors["model.embed_tokens.weight"])], tensors["model.embed_tokens.weight"] * 1.25)
    assert engine.machine.weights.head is embed


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda old, _: write_tiny(old.parent / "deep", num_hidden_layers=3), "num_layers|hidden_layers"),
        (lambda old, _: write_tiny(old.parent / "rope", rope_theta=1e4), "rope"),
        (lambda _, tensors: {k: x for k, x in tensors.items() if "norm" not in k}, "missing: .*norm"),
        (lambda _, tensors: {**tensors, "model.layers.9.x": torch.zeros(1)}, "unexpected: model.layers.9.x"),
        (lambda _, tensors: {**tensors, "model.norm.weight": torch.zeros(5)}, r"model.norm.weight has shape \(5,\)"),
        (lambda _, tensors: {**tensors, "model.norm.weight": torch.full((48,), torch.nan)}, "NaN"),
        (lambda old, _: old / "nowhere", "nowhere"),
        (lambda _old, _: 5, "int is no folder"),
    ],
)
def test_other_weights_are_refused_and_nothing_changes(folders: tuple[Path, Path], make: Any, said: str) -> None:
    """By name; the engine goes on as it was, in the middle of a run."""
    old, _ = folders
    engine, want = small(old), outputs(small(old))
    seqs = [engine.add(Request(tuple(prompt), PARAMS)) for prompt in PROMPTS]
    engine.step()
    with pytest.raises(CheckpointError, match=said):
        swap_weights(engine, make(old, load_file(old / "model.safetensors")))
    ends = {done.seq: done.output for done in run(engine, seqs)}
    assert [ends[seq] for seq in seqs] == want
    assert engine.world.state.version == 0


def test_weights_of_another_shape_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Those of an engine of a wider model."""
    wide = small(write_tiny(tmp_path, intermediate_size=128)).machine.weights
    with pytest.raises(CheckpointError, match="tensor"):
        swap_weights(small(folders[0]), wide)


def test_weights_of_fewer_layers_are_refused(folders: tuple[Path, Path]) -> None:
    """By their number; the engine goes on with those it had."""
    engine = small(folders[0])
    before = outputs(engine)
    fewer = evolve(engine.machine.weights, layers=engine.machine.weights.layers[:-1])
    with pytest.raises(CheckpointError, match=r"the weights are \d+ tensors, the engine's \d+"):
        swap_weights(engine, fewer)
    assert outputs(engine) == before
