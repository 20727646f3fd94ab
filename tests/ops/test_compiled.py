"""One compiled function for all layers: how often it is compiled, and that it computes what eager ops compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import tiny
from agentinfer.models.model import Model, kv_layout, load_model
from agentinfer.ops import norm, rope
from agentinfer.ops.comm import alone
from agentinfer.ops.compiled import compiled_layer, own, rounding
from agentinfer.ops.custom import opaque_ops
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import KvCache, allocate
from agentinfer.ops.provide import Ops, composed, reference, uniform
from compilers import COMPILERS, counting

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's of torch itself
CPU = torch.device("cpu")
BATCHES = (1, 2, 3, 7, 8)
PROMPTS = (1, 2, 5, 17, 64)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (1, {}),
    "qwen2 with a window": (2, {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1,
    }),
    "llama with biases": (1, {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "mlp_bias": True,
    }),
}  # fmt: skip
"""name -> kinds of layers, changes to tiny.CONFIG."""


class Run:
    """A model over poisoned KV of its own, 8 rows of 5 blocks."""

    def __init__(self, model: Model, weights: Any, ops: Ops, blocks: int = 40) -> None:
        self.model, self.weights, self.ops = model, weights, ops
        self.kv: KvCache = allocate(kv_layout(model, 1, 16), blocks, 8, 5, CPU, math.nan)

    def step(self, counts: list[int], start: list[int]) -> Tensor:
        """Logits of all positions: row i computes *counts[i]* from *start[i]* on."""
        rows = [[(3 * i + at + n) % 96 for at in range(n)] for i, n in enumerate(counts)]
        blocks = [list(range(1 + 5 * i, 6 + 5 * i)) for i in range(len(counts))]
        x, kv = by_hand(self.kv, rows, start, blocks, every=True)
        logits, self.kv = self.model.forward(self.model.config, self.weights, self.ops, alone(), kv, x)
        return logits


def pair(folder: Path, backend: Any, ops: Ops, eager: Ops, **config: Any) -> tuple[Run, Run]:
    """A model compiled, and the same eager."""
    model, weights = load_model(tiny.write_tiny(folder, **config), None, alone())
    assert ops.traced is not None
    wrap = partial(compiled_layer, traced=ops.traced, shape=model.heads(model.config, 1), backend=backend)
    return Run(evolve(model, forward=model.forward_through(wrap)), weights, ops), Run(model, weights, eager)


def sweep() -> list[tuple[list[int], list[int]]]:
    """(counts, starts) of prompts of every length, alone and beside others, and of decodes of every batch."""
    steps = [([n], [0]) for n in PROMPTS]
    steps += [([1] * n, [0] * n) for n in BATCHES]
    steps += [([1] * n, [1] * n) for n in reversed(BATCHES)]
    return [*steps, ([5, 1, 17], [1, 2, 0]), ([2] * 8, [2] * 8)]


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("name", CASES)
def test_two_compilations_a_kind_of_layer_and_the_numbers_of_eager(name: str, first: int, tmp_path: Path) -> None:
    """Whichever step comes first, all batches and prompts take two compilations a kind of layer, and in float32 logits
    and KV are those of the same ops run eagerly, to the bit.
    """
    kinds, config = CASES[name]
    counter = counting("aot_eager")
    compiled, eager = pair(tmp_path, counter, opaque_ops(), opaque_ops(), **config)
    steps = sweep()
    for counts, start in steps[first:] + steps[:first]:
        assert torch.equal(compiled.step(counts, start), eager.step(counts, start))
    assert counter.frame_count <= 2 * kinds
    for mine, theirs in zip(compiled.kv.layers, eager.kv.layers, strict=True):
        assert torch.equal(mine.k[1:].nan_to_num(), theirs.k[1:].nan_to_num())
        assert mine.v is not None
        assert theirs.v is not None
        assert torch.equal(mine.v[1:].nan_to_num(), theirs.v[1:].nan_to_num())


def test_another_pool_is_no_reason_to_compile_again(tmp_path: Path) -> None:
    """Trial steps at start have fewer blocks than the engine will have."""
    counter = counting("aot_eager")
    compiled, _ = pair(tmp_path, counter, opaque_ops(), reference())
    small = Run(compiled.model, compiled.weights, compiled.ops, 11)
    for counts in ([3, 1], [1]):
        small.step(counts, [0] * len(counts))
        compiled.step(counts, [0] * len(counts))
    assert counter.frame_count == 2


def fusing_ops() -> Ops:
    """Attention by operators, the rest in plain torch, as on a GPU."""
    opaque, plain = opaque_ops(), reference().primitives
    mixed = evolve(plain, write_kv=opaque.primitives.write_kv, paged_attention=opaque.primitives.paged_attention)
    return evolve(uniform(composed("fusing", mixed)), traced=opaque.traced)


@pytest.mark.parametrize("backend", ["aot_eager", *COMPILERS])
@pytest.mark.parametrize("maker", [opaque_ops, fusing_ops])
def test_logits_are_those_of_the_reference(backend: str, maker: Callable[[], Ops], tmp_path: Path) -> None:
    """Compiled, by the compiler that production uses where this machine has one for C++, logits are the reference's."""
    counter = counting(backend)
    compiled, eager = pair(tmp_path, counter, maker(), reference())
    for counts, start in sweep():
        torch.testing.assert_close(compiled.step(counts, start), eager.step(counts, start), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 2


def test_engines_do_not_share_compilations(tmp_path: Path) -> None:
    """Each compiled layer counts its own: ten engines in one process are not one too many for torch's limit of 8."""
    model, weights = load_model(tiny.write_tiny(tmp_path), None, alone())
    for _ in range(10):
        counter, ops = counting("eager"), opaque_ops()
        assert ops.traced is not None
        wrap = partial(compiled_layer, traced=ops.traced, shape=model.heads(model.config, 1), backend=counter)
        run = Run(evolve(model, forward=model.forward_through(wrap)), weights, ops)
        run.step([2], [0])
        assert counter.frame_count == 1


def test_what_can_not_be_traced_whole_raises(tmp_path: Path) -> None:
    """An op that looks at a tensor's value is an error, not a step that runs eagerly."""
    plain = opaque_ops()

    def nosy(act: Tensor, *rest: Any) -> Any:
        return plain.down_add(act if act.sum() > 0 else -act, *rest)

    compiled, _ = pair(tmp_path, "aot_eager", evolve(plain, down_add=nosy), reference())
    from torch._dynamo.exc import TorchDynamoException

    with pytest.raises(TorchDynamoException):
        compiled.step([2], [0])


def rotated(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    q, k = rope.rotary_embedding(positions, x, x[:, :1], table, interleaved=False)
    return torch.cat((q, k), 1)


PLAIN: dict[str, Callable[[int, torch.dtype], tuple[Any, ...]]] = {
    "rms_norm": lambda n, dtype: (norm.rms_norm, _rand(n, 48, dtype=dtype), _rand(48, dtype=dtype), 1e-6),
    "fused_add_rms_norm": lambda n, dtype: (
        norm.fused_add_rms_norm, _rand(n, 48, dtype=dtype), _rand(n, 48, dtype=dtype, seed=1), _rand(48, dtype=dtype),
        1e-6,
    ),
    "silu_and_mul": lambda n, dtype: (norm.silu_and_mul, _rand(n, 96, dtype=dtype)),
    "rotary_embedding": lambda n, dtype: (
        rotated, _rand(n, 3, 16, dtype=dtype), torch.arange(n), rope.cos_sin(rope.RopeSpec(1e4, 16), 70),
    ),
}  # fmt: skip
"""Plain torch that a compiler fuses on a GPU -> the function and its arguments for n positions."""


def _rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ulps(a: Tensor, b: Tensor) -> int:
    """The most that two bfloat16 tensors are apart, in steps from one number to the next."""
    places = [x.contiguous().view(torch.int16).to(torch.int32) for x in (a, b)]
    ordered = [torch.where(x < 0, -32768 - x, x) for x in places]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("backend", ["aot_eager", *COMPILERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_norms_rope_and_activation_compile_twice(name: str, dtype: torch.dtype, backend: str) -> None:
    """Over all batches and prompts each takes two compilations; float32 is eager's to the bit where the same operations
    run, and within rounding where they are fused, bfloat16 within one step of its last place.
    """
    import torch._inductor.config

    counter = counting(backend)
    function, *_ = PLAIN[name](1, dtype)
    with torch._inductor.config.patch(rounding("inductor")):
        _compiled_as_eager(
            name, dtype, backend, torch.compile(own(function), fullgraph=True, dynamic=False, backend=counter)
        )
    assert counter.frame_count <= 2


def _compiled_as_eager(name: str, dtype: torch.dtype, backend: str, compiled: Callable[..., Any]) -> None:
    function, *_ = PLAIN[name](1, dtype)
    for n in (*BATCHES, *PROMPTS):
        _, *args = PLAIN[name](n, dtype)
        for x in args:
            if isinstance(x, Tensor) and len(x) == n:
                torch._dynamo.mark_dynamic(x, 0)
        got, want = compiled(*args), function(*args)
        for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            if dtype == torch.bfloat16:
                assert ulps(mine, theirs) <= 1
            elif backend == "aot_eager":
                assert torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
