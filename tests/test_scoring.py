"""Log-probabilities of given tokens against transformers, and beside a running engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import toys
from agentinfer.build import Settings
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, generate, open_engine, stream
from agentinfer.scoring import Score, groups, score
from agentinfer.state.check import violations
from agentinfer.state.engine import digest
from agentinfer.state.request import SamplingParams
from agentinfer.state.wanted import MOST_LOGITS
from models import tiny
from tiny import write_tiny

LENGTHS = (1000, 1, 2, 37, 5)
PROMPTS = [[int(t) for t in torch.randint(0, 90, (n,), generator=torch.Generator().manual_seed(n))] for n in LENGTHS]
CLOSE = 1e-4


@pytest.fixture(scope="module", params=["qwen3", "qwen2-window", "deepseek-v3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with room for 1,000 tokens, and its transformers original."""
    family, change = tiny.CASES[request.param]
    name = f"long-{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CASES", {**tiny.CASES, name: (family, {**change, "max_position_embeddings": 1024})})
        return tiny.make(name, tmp_path_factory.mktemp("score"))


def small(folder: Path, **changes: Any) -> Engine:
    """A small engine."""
    base = Settings(dtype="float32", block_size=4, num_blocks=300, max_num_seqs=8, max_num_batched_tokens=64)
    return open_engine(folder, evolve(base, **changes))


def check(got: Score, logits: torch.Tensor, top: int) -> None:
    """*got* is what *logits* [N, V] of the whole sequence say."""
    want = logits.double().log_softmax(-1)[:-1]
    said = torch.tensor(got.tokens)[1:]
    np.testing.assert_allclose(got.logprobs, want.gather(-1, said[:, None])[:, 0], atol=CLOSE)
    np.testing.assert_allclose(got.top_logprobs, want.sort(-1, descending=True).values[:, :top], atol=CLOSE)
    np.testing.assert_allclose(got.top_logprobs, want.gather(-1, torch.from_numpy(got.top_ids).long()), atol=CLOSE)
    places = (want > want.gather(-1, said[:, None])).sum(-1) + 1
    near = ((want - want.gather(-1, said[:, None])).abs() < CLOSE).sum(-1)
    assert bool(((torch.from_numpy(got.ranks) - places).abs() < near).all())
    assert (got.logprobs.dtype, got.ranks.dtype, got.top_ids.shape) == (np.float32, np.int32, (len(said), top))


def test_scores_are_those_of_transformers(case: tiny.Tiny) -> None:
    """1,000 tokens, and shorter ones beside them, in passes of 64: all within 1e-4, with alternatives and ranks."""
    found = score(small(case.folder), PROMPTS, top=3)
    for got, tokens in zip(found, PROMPTS, strict=True):
        assert got.tokens == tuple(tokens)
        check(got, case.logits(tokens), 3)


def test_a_pass_more_or_less_changes_nothing(tmp_path: Path) -> None:
    """Scores do not depend on how many positions a pass has, nor on who is scored beside."""
    folder = write_tiny(tmp_path)
    prompts = [p[:200] for p in PROMPTS]
    alone_ = [score(small(folder, max_num_batched_tokens=999), [p], top=2)[0] for p in prompts]
    for most in (1, 7, 64):
        for one, other in zip(alone_, score(small(folder, max_num_batched_tokens=most), prompts, top=2), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            assert one.ranks.tolist() == other.ranks.tolist()


def test_an_engine_that_runs_does_not_notice(tmp_path: Path) -> None:
    """In the middle of a stream, with a step in flight, scoring changes neither the state nor the tokens."""
    engine = small(write_tiny(tmp_path))
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    (want,) = generate(engine, [PROMPTS[4]], params)
    got = list[int]()
    for delta in stream(engine, PROMPTS[4], params):
        got += delta.token_ids
        before = digest(engine.world.state)
        score(engine, [PROMPTS[3]])
        assert digest(engine.world.state) == before
    assert tuple(got) == want.output_ids
    assert violations(engine.world.state) == []


def test_greedy_outputs_have_rank_one(tmp_path: Path) -> None:
    """What the engine chose greedily is the likeliest at each place."""
    engine = small(write_tiny(tmp_path))
    (done,) = generate(engine, [PROMPTS[4]], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    (got,) = score(engine, [(*done.prompt_ids, *done.output_ids)], top=1)
    first = len(done.prompt_ids) - 1
    assert got.ranks[first:].tolist() == [1] * 20
    assert got.top_ids[first:, 0].tolist() == list(done.output_ids)


def test_text_is_scored_as_its_ids(tmp_path: Path) -> None:
    """A text is what the tokenizer makes of it."""
    folder = toys.folder_of(write_tiny(tmp_path, vocab_size=280), toys.byte_level())
    one, other = score(small(folder), ["hello", list(toys.byte_level().encode("hello").ids)])
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


# --- the parts ------------------------------------------------------------------------------------------------------


def test_groups_hold_what_a_pass_can() -> None:
    """All in order, as many as fit; one that is larger than a pass is alone."""
    assert groups([3, 3, 2, 9, 0, 1, 8], 8) == [[0, 1, 2], [3], [4, 5], [6]]
    assert groups([0, 0], 1) == [[0, 1]]
    assert groups([], 4) == []
    for counts in itertools.product((0, 1, 4, 6), repeat=4):
        found = groups(counts, 4)
        assert [i for group in found for i in group] == [0, 1, 2, 3]
        assert all(sum(counts[i] for i in group) <= 4 or len(group) == 1 for group in found)


@pytest.mark.parametrize(
    ("prompts", "top", "said"),
    [
        ([[1], []], 0, r"prompts\[1\]: has no tokens"),
        ([[96]], 0, r"prompts\[0\]: token id 96 is outside the vocabulary of 96"),
        ([[-1, 2]], 0, r"prompts\[0\]: token id -1"),
        ([[1] * 257], 0, r"prompts\[0\]: has 257 tokens; max_model_len is 256"),
        (["a"], 0, "no tokenizer"),
        ([[1]], -1, "top: must be"),
        ([[1]], 97, "top: must be"),
    ],
)
def test_what_can_not_be_scored_is_refused(tmp_path: Path, prompts: Any, top: int, said: str) -> None:
    """By name, before anything is computed."""
    with pytest.raises(InvalidRequest, match=said):
        score(small(write_tiny(tmp_path)), prompts, top)


def test_a_pass_has_few_logits() -> None:
    """At the vocabulary of Qwen a pass is of 220 positions: 134 MB of logits."""
    assert MOST_LOGITS // 151_936 == 220
