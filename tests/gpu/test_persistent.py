"""The persistent kernel on a GPU: against the reference in float32, in graphs, with a lost packet, and as an engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.build import Settings, build
from agentinfer.loop import Engine, generate, open_engine, start
from agentinfer.models import dense
from agentinfer.ops import persistent
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import choose
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import allocate, renew
from agentinfer.ops.persistent import RowKernel, persistent_ops
from agentinfer.ops.provide import Ops
from agentinfer.state.request import SamplingParams
from agentinfer.steps import prefill_step
from gpu_shapes import SHAPES
from row_steps import Case, case, check, inputs

CUDA = torch.device("cuda", 0)
Folder = Callable[[str, str], Path]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
LIMIT = 3e-2
"""Of the error of logits, as for other ops in bfloat16. Queries that are not normed, over random keys, come near it."""
LIMIT_NS = 20_000_000
MODELS = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 30011,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 9001,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2,
        "vocab_size": 9001,
    },
}  # fmt: skip


def ops_of(**options: Any) -> Ops:
    triton, _ = choose("triton", CUDA, torch.bfloat16, HeadShape(4, 2, 64), 16)
    return persistent_ops(triton, CUDA, **options)


def kernel_of(ops: Ops) -> RowKernel:
    assert isinstance(ops.row_step, RowKernel)
    return ops.row_step


def stepped(x: Case, ops: Ops, at: Inputs, kv: Any) -> Tensor:
    return dense.forward(x.config, x.weights, ops, alone(CUDA), kv, at)[0]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", [*sorted(SHAPES), *sorted(MODELS)])
def test_logits_and_keys_are_the_reference_s(tmp_path: Path, shape: str, block_size: int) -> None:
    """Contexts from none to thousands of keys."""
    x, ops = case(tmp_path, CUDA, block_size, **{**SHAPES, **MODELS}[shape]), ops_of()
    for i, position in enumerate((0, 1, 15, 16, 130, 777, 2999)):
        at, kv = inputs(x.kv, 31 * i + 1, position)
        error = check(x, stepped(x, ops, at, kv), 31 * i + 1, position, LIMIT)
        print(f"{shape}, {position} keys: {error:.4f}")
    [program] = kernel_of(ops).programs.values()
    assert persistent.where_late(program.mailbox) is None


def test_replays_are_eager_steps(tmp_path: Path) -> None:
    """Bit for bit over 200 steps whose inputs change in place."""
    x, ops = case(tmp_path, CUDA, **MODELS["Qwen3-0.6B"]), ops_of()
    at, kv = inputs(x.kv, 1, 2999)
    stepped(x, ops, at, kv)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        captured = stepped(x, ops, at, renew(x.kv, "test"))
        graph.capture_end()
    torch.cuda.synchronize()
    for position in range(100, 300):
        now, kv = inputs(x.kv, position % 97, position)
        for name in ("ids", "positions", "slots", "context"):
            getattr(at, name).copy_(getattr(now, name))
        graph.replay()
        torch.cuda.synchronize()
        want = stepped(x, ops, at, kv)
        assert torch.equal(captured, want), position


@pytest.mark.parametrize("phase", range(1, len(persistent.PHASES)))
def test_a_lost_packet_fails_its_step(tmp_path: Path, phase: int) -> None:
    """No logit is a number, nothing hangs, and who asks learns where it waited."""
    x, ops = case(tmp_path, CUDA, num_hidden_layers=2), ops_of(limit_ns=LIMIT_NS, lose=phase)
    for _ in range(2):  # the first one compiles
        at, kv = inputs(x.kv, 5, 100)
        begin = time.monotonic()
        logits = stepped(x, ops, at, kv)
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        assert logits.isnan().all()
    assert took < 2
    [program] = kernel_of(ops).programs.values()
    assert persistent.where_late(program.mailbox) == f"layer 0: {persistent.PHASES[phase]}"
    at, kv = inputs(x.kv, 5, 100)
    check(x, stepped(x, ops_of(), at, kv), 5, 100)


def opened(folder: Path, ops: str, **changes: Any) -> Engine:
    base = Settings(
        device="cuda", num_blocks=600, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024, seed=0
    )
    return open_engine(folder, evolve(base, ops=ops, **changes))


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_generates_what_triton_does(tiny_folder: Folder, shape: str, eager: bool) -> None:
    """Alone and four together, greedy: the same tokens up to a near tie."""
    folder = tiny_folder(shape, "bfloat16")
    ours, theirs = opened(folder, "persistent", eager=eager), opened(folder, "triton", eager=eager)
    rng = random.Random(4)
    asked = [[rng.randrange(1000) for _ in range(n)] for n in (1, 40, 200, 90)]
    for some in ([asked[1]], [asked[2]], asked):
        for prompt, a, b in zip(
            some, *(generate(e, some, GREEDY, progress=False) for e in (ours, theirs)), strict=True
        ):
            assert a.error is None
            assert b.error is None
            same = next((i for i, (p, q) in enumerate(zip(a.output_ids, b.output_ids, strict=True)) if p != q), None)
            assert same is None or tie(theirs, [*prompt, *b.output_ids[:same]], a.output_ids[same]), same


def tie(engine: Engine, prompt: list[int], token: int) -> bool:
    """Whether *token* is nearly as good as the best after *prompt*."""
    m = engine.machine
    blocks = list(range(1, 2 + len(prompt) // m.limits.block_size))
    kv = allocate([layer.layout for layer in engine.world.device.kv.layers], len(blocks), 1, len(blocks), CUDA)
    x, kv = by_hand(kv, [prompt], [0], [blocks])
    [logits] = prefill_step(m, kv, x)[0]
    return bool(logits.max() - logits[token] < 0.1 * logits.std())


def test_an_engine_whose_step_loses_a_packet_fails_the_request(tiny_folder: Folder) -> None:
    """It ends with an error, in a graph, and the engine lives."""
    folder = tiny_folder("qwen3", "bfloat16")
    settings = Settings(
        device="cuda", num_blocks=100, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, seed=0
    )
    machine, device = build(folder, settings, (), ops=ops_of(limit_ns=LIMIT_NS, lose=3))
    engine = start(machine, device)
    [alone_] = generate(engine, [[1, 2, 3]], GREEDY, progress=False)
    assert alone_.error is not None
    together = generate(engine, [[1, 2, 3], [4, 5]], GREEDY, progress=False)
    assert len(together[0].output_ids) > 1
