"""The whole engine on a GPU: graphs, overlap and providers change nothing but the time."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from agentinfer.build import Settings, new_device
from agentinfer.errors import GraphBinding, InvalidSetting
from agentinfer.graphs import bindings
from agentinfer.loop import Engine, World, advance, generate, open_engine, start
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.ops.provide import reference
from agentinfer.state.check import violations
from agentinfer.state.request import Request, SamplingParams
from agentinfer.steps import prefill_step
from gpu_shapes import SHAPES

Folder = Callable[[str, str], Path]
Context = Callable[[], AbstractContextManager[None]]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def opened(folder: Path, **changes: Any) -> Engine:
    """An engine on the GPU with a small pool."""
    base = Settings(
        device="cuda", num_blocks=600, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=1024, seed=0
    )
    return open_engine(folder, evolve(base, **changes))


def prompts(count: int, longest: int = 100, seed: int = 0) -> list[list[int]]:
    """Random ones."""
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def tokens(engine: Engine, asked: list[list[int]], params: Any = GREEDY) -> list[tuple[int, ...]]:
    """What the engine generates."""
    results = generate(engine, asked, params, progress=False)
    assert [r.error for r in results] == [None] * len(asked)
    assert violations(engine.world.state) == []
    return [r.output_ids for r in results]


def logits_of(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """[positions, V] of one prompt in one prefill."""
    m, device = engine.machine, engine.machine.ranks.device
    blocks = list(range(1, 2 + len(prompt) // m.limits.block_size))
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    kv = allocate(layouts, len(blocks), 1, len(blocks), device)
    x, kv = by_hand(kv, [prompt], [0], [blocks], every=True)
    return prefill_step(m, kv, x)[0]


def decoded_logits(engine: Engine, prompt: list[int], rows: int) -> torch.Tensor:
    """[positions, V] of *prompt* token by token, *rows* equal rows together; of the first row."""
    m, device = engine.machine, engine.machine.ranks.device
    size = m.limits.block_size
    per_row = 1 + len(prompt) // size
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    kv = allocate(layouts, per_row * rows, rows, per_row, device)
    blocks = [list(range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(rows)]
    found = []
    for at, token in enumerate(prompt):
        x, kv = by_hand(kv, [[token]] * rows, [at] * rows, blocks)
        logits, kv = prefill_step(m, kv, x)
        found.append(logits[:1])
    return torch.cat(found)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_the_reference_ops(tiny_folder: Folder, shape: str, dtype: str) -> None:
    """Prefill, and decode in batches of every kind of product, against the reference in float32 over these weights."""
    folder = tiny_folder(shape, "float32")
    engine = opened(folder, dtype=dtype, eager=True)
    [prompt] = prompts(1, 2) and [[random.Random(5).randrange(1000) for _ in range(70)]]
    truth = opened(folder, dtype="float32", eager=True)
    truth.machine = evolve(truth.machine, ops=reference())
    if dtype != "float32":  # the same rounded weights
        rounded = opened(folder, dtype=dtype, eager=True)
        truth.machine = evolve(truth.machine, weights=_as_float(rounded.machine.weights))
    want = logits_of(truth, prompt)
    limit = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    for name, got in {
        "prefill": logits_of(engine, prompt),
        **{f"decode of {rows}": decoded_logits(engine, prompt[:30], rows) for rows in (1, 3, 17, 80)},
    }.items():
        error = (got - want[: len(got)]).norm() / want[: len(got)].norm()
        assert float(error) < limit, f"{name}: {float(error)}"


def _as_float(weights: Any) -> Any:
    from attrs import fields, has

    if isinstance(weights, torch.Tensor):
        return weights.float()
    if isinstance(weights, tuple):
        return tuple(_as_float(x) for x in weights)
    if has(type(weights)):
        return evolve(weights, **{f.name: _as_float(getattr(weights, f.name)) for f in fields(type(weights))})
    return weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_replayed_graph_is_the_eager_step_of_its_bucket(tiny_folder: Folder, dtype: str) -> None:
    """Bit for bit over 200 steps: 24 rows, which are a bucket, so that eager steps have its shape too."""
    folder, asked = tiny_folder("qwen3", dtype), prompts(24)
    long = evolve(GREEDY, max_tokens=200)
    assert tokens(opened(folder), asked, long) == tokens(opened(folder, eager=True), asked, long)


@pytest.mark.parametrize("policy", ["throughput", "reserve"])
@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 24), ("float32", 40)])
def test_overlap_changes_no_token(tiny_folder: Folder, policy: str, dtype: str, count: int) -> None:
    """Steps planned before the last one has landed give what steps in turn give: of 24 rows, which all run from the
    start, and in float32 of 40, where some get a row a step later, so that steps have other sizes and round otherwise.
    """
    folder, asked = tiny_folder("qwen3", dtype), prompts(count, 200)
    assert tokens(opened(folder, policy=policy), asked) == tokens(opened(folder, policy=policy, overlap=False), asked)


def test_seeded_sampling_and_filters_in_graphs_and_without(tiny_folder: Folder) -> None:
    """Temperature, top-k, top-p, min-p, banned ends: the same tokens captured and eager, alone and together."""
    folder, asked = tiny_folder("qwen3", "float32"), prompts(16)
    params = [
        SamplingParams(
            max_tokens=30, temperature=(0.0, 0.7, 1.5)[i % 3], top_p=(1.0, 0.8)[i % 2], top_k=(0, 5, 0, 50)[i % 4],
            min_p=(0.0, 0.1)[i // 8], seed=i, ignore_eos=True, min_tokens=(0, 3)[i % 2], stop_token_ids=(7,) * (i % 2),
        )
        for i in range(16)
    ]  # fmt: skip
    captured, eager = opened(folder), opened(folder, eager=True)
    together = tokens(captured, asked, params)
    assert together == tokens(eager, asked, params)
    engine = opened(folder)
    assert [tokens(engine, [asked[i]], params[i])[0] for i in range(16)] == together


def test_padding_rows_change_no_other_row(tiny_folder: Folder) -> None:
    """9 rows in a graph of 16: the sink full of NaN changes nothing."""
    folder, asked = tiny_folder("qwen3", "bfloat16"), prompts(9)
    want = tokens(opened(folder), asked)
    engine = opened(folder)
    for layer in engine.world.device.kv.layers:
        for plane in (layer.k, layer.v):
            assert plane is not None
            plane[0].fill_(float("nan"))
    assert tokens(engine, asked) == want


def steady(engine: Engine, rows: int) -> World:
    """*rows* sequences in decode, a step in flight."""
    for prompt in prompts(rows, 20):
        engine.add(Request(tuple(prompt), evolve(GREEDY, max_tokens=600)))
    for _ in range(30):
        engine.step()
    return engine.world


def test_steady_decode_allocates_nothing_and_never_waits_for_all(tiny_folder: Folder, never_waiting: Context) -> None:
    """No cudaMalloc, no synchronizing call of torch, no capture in 200 steps of steady decode."""
    engine = opened(tiny_folder("qwen3", "bfloat16"))
    world = steady(engine, 24)
    before = torch.cuda.memory_stats()
    with never_waiting():
        for _ in range(200):
            world, output = advance(engine.machine, world)
            assert output is not None
            assert len(output.tokens) == 24
    after = torch.cuda.memory_stats()
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]
    engine.world = world


def test_graphs_write_nothing_but_what_they_keep(tiny_folder: Folder) -> None:
    """All memory that is free once they are captured is filled; decoding in graphs of many sizes changes none of it."""
    engine = opened(tiny_folder("qwen3", "bfloat16"))
    asked = [[1 + i, 2, 3] for i in range(20)]
    want = tokens(engine, asked)
    sizes = [size for size in (1, 64, 128, 512) for _ in range(3000)]
    filled = [torch.full((size,), 7, dtype=torch.int64, device="cuda") for size in sizes]
    assert tokens(engine, asked) == want
    assert all(bool((x == 7).all()) for x in filled)


def test_a_graph_refuses_other_memory(tiny_folder: Folder) -> None:
    """A device with other KV than was captured over fails the step's requests by name; the engine goes on."""
    engine = opened(tiny_folder("qwen3", "bfloat16"))
    m, device = engine.machine, engine.world.device
    layouts = tuple(layer.layout for layer in device.kv.layers)
    other = new_device(m.limits, layouts, m.ranks.device)
    assert bindings(other) != bindings(device)
    wrong = start(m, other)
    [result] = generate(wrong, [[1, 2, 3]], GREEDY, progress=False)
    assert result.finish_reason == "error"
    assert result.error is not None
    assert GraphBinding.__name__ in result.error
    assert tokens(engine, [[1, 2, 3]])[0]


def test_junk_on_the_device_does_not_reach_a_graph(tiny_folder: Folder) -> None:
    """Memory that is allocated, filled with NaN and freed between replays changes no token."""
    folder, asked = tiny_folder("qwen3", "bfloat16"), prompts(5)
    want = tokens(opened(folder), asked)
    engine = opened(folder)
    seqs = {engine.add(Request(tuple(prompt), GREEDY)): i for i, prompt in enumerate(asked)}
    got: dict[int, tuple[int, ...]] = {}
    rng = random.Random(1)
    while engine.unfinished:
        junk = [torch.full((rng.randrange(1, 1 << 20),), float("nan"), device="cuda") for _ in range(3)]
        output = engine.step()
        del junk
        got.update({seqs[done.seq]: done.output for done in output.finished} if output else {})
    assert [got[i] for i in range(5)] == want


def test_more_rows_than_the_largest_graph_cannot_be(tiny_folder: Folder) -> None:
    """All sizes up to max_num_seqs are captured: 13 rows of at most 13 take a graph."""
    engine = opened(tiny_folder("qwen3", "bfloat16"), max_num_seqs=13)
    assert tokens(engine, prompts(13))
    assert tokens(engine, prompts(30))


def test_out_of_memory_at_start_names_the_settings(tiny_folder: Folder) -> None:
    """Ten times the memory of any GPU for KV is refused, naming what to change."""
    with pytest.raises(InvalidSetting, match="kv_utilization"):
        opened(tiny_folder("qwen3", "bfloat16"), num_blocks=2_000_000_000 // 16)


def test_forks_and_preemption_share_a_device(tiny_folder: Folder) -> None:
    """Few blocks: rows are preempted and recomputed; forks copy blocks; greedy tokens stay those of one alone."""
    folder = tiny_folder("qwen3", "float32")
    alone = opened(folder)
    asked = prompts(12, 60)
    want = [tokens(alone, [prompt])[0] for prompt in asked]
    tight = opened(folder, num_blocks=24)
    got = tokens(tight, asked)
    same = sum(a == b for a, b in zip(got, want, strict=True))
    assert same >= 11  # float32 products of other shapes may turn a near tie
    engine = opened(folder)
    seq = engine.add(Request(tuple(asked[0]), GREEDY))
    for _ in range(10):
        engine.step()
    children = engine.fork(seq, [1, 2])
    done: dict[int, tuple[int, ...]] = {}
    while engine.unfinished:
        output = engine.step()
        done.update({one.seq: one.output for one in output.finished} if output else {})
    assert done[seq] == want[0]
    for child in children:
        assert done[child] == want[0]


COMPILES = """
import random, sys
import triton
from agentinfer.build import Settings
from agentinfer.loop import generate, open_engine
from agentinfer.state.request import SamplingParams
sizes = {"num_blocks": 600, "max_num_seqs": 24, "max_num_batched_tokens": 256, "max_model_len": 1024}
settings = Settings(device="cuda", **sizes, seed=0)
engine = open_engine(sys.argv[1], settings)
late = []
triton.knobs.runtime.jit_post_compile_hook = lambda **told: late.append(told["fn"].name)
draw = random.Random(1)
for count in (1, 3, 40):
    prompts = [[draw.randrange(1000) for _ in range(draw.randrange(1, 400))] for _ in range(count)]
    for temperature, top_p in ((0.0, 1.0), (0.7, 1.0), (0.7, 0.9)):
        generate(engine, prompts, SamplingParams(max_tokens=20, temperature=temperature, top_p=top_p), progress=False)
print("late", sorted(set(late)))
"""


@pytest.mark.parametrize("ops", ["triton", "auto"])
def test_nothing_is_compiled_after_the_start(tiny_folder: Folder, ops: str) -> None:
    """A new process compiles every kernel before its first request: chunks, mixes, odd sizes and filters bring none."""
    script = COMPILES.replace("seed=0)", f'seed=0, ops="{ops}")')
    command = [sys.executable, "-c", script, str(tiny_folder("qwen3", "bfloat16"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "late []" in done.stdout, done.stdout
