"""Structured output on a GPU: graphs, overlap and other rows change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import toys
from agentinfer.build import Settings
from agentinfer.loop import generate, open_engine
from agentinfer.state.request import SamplingParams
from tiny import write_tiny

pytest.importorskip("llguidance")

ARRAY = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 5, "maxItems": 5}
FORMS: tuple[dict[str, Any] | None, ...] = (
    {"json": ARRAY, "disable_any_whitespace": True},
    None,
    {"regex": "(ab|12){8,12}"},
    {"choice": ["yes", "no", "abababab"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokens are bytes."""
    tokenizer = toys.byte_level()
    place = write_tiny(
        tmp_path_factory.mktemp("tiny"), hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=300,
        max_position_embeddings=1024, eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )  # fmt: skip
    return toys.folder_of(place, tokenizer, toys.CHATML)


def test_the_tokens_are_those_of_plain_steps(folder: Path) -> None:
    """Captured graphs, overlapped steps and a batch of rows with and without a form give what eager steps give."""
    base = Settings(device="cuda", num_blocks=400, max_num_seqs=16, max_num_batched_tokens=128, seed=0)
    asks = [[3 + i, 7, 8] for i in range(12)]
    each = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, structured_outputs=form, ignore_eos=form is None)
        for i, form in enumerate(FORMS * 3)
    ]
    plain = open_engine(folder, evolve(base, eager=True, overlap=False))
    want = [generate(plain, [ask], params, progress=False)[0] for ask, params in zip(asks, each, strict=True)]
    assert [one.error for one in want] == [None] * 12
    for overlap in (True, False):
        engine = open_engine(folder, evolve(base, overlap=overlap))
        assert engine.machine.replay is not None
        found = generate(engine, asks, each, progress=False)
        assert [one.output_ids for one in found] == [one.output_ids for one in want]
        assert all(len(json.loads(one.text or "")) == 5 for one in found[::4])
