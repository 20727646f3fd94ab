"""Log-probabilities on a GPU: after captured graphs as without them, for rows that filter, too; without waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from agentinfer.build import Settings
from agentinfer.judging import MODES
from agentinfer.loop import Engine, generate, open_engine
from agentinfer.ops.logprobs import judge, judged
from agentinfer.scoring import score
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.request import SamplingParams
from agentinfer.swap import swap_weights

Folder = Callable[[str, str], Path]
Context = Callable[[], AbstractContextManager[None]]
PLAIN = SamplingParams(max_tokens=24, seed=7, ignore_eos=True, logprobs=3)
EACH = [
    PLAIN,
    evolve(PLAIN, temperature=0.0, logprobs=0),
    evolve(PLAIN, top_p=0.9, top_k=50),
    evolve(PLAIN, logprobs=None, top_k=5),
    evolve(PLAIN, min_p=0.02, temperature=0.7, logit_bias={5: 4.0}, repetition_penalty=1.2),
    evolve(PLAIN, n=3, prompt_logprobs=1),
]
PROMPTS = [[(7 * i + j) % 900 for j in range(5 + 9 * i)] for i in range(len(EACH))]


def opened(folder: Path, **changes: Any) -> Engine:
    """An engine on the GPU with a small pool."""
    base = Settings(
        device="cuda", num_blocks=600, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=1024, seed=0
    )
    return open_engine(folder, evolve(base, **changes))


def close(one: tuple[TokenLogprobs | None, ...], other: tuple[TokenLogprobs | None, ...], atol: float) -> None:
    """The same tokens, and log-probabilities that differ by rounding at most."""
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.token_id == b.token_id
            np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=atol)


@pytest.mark.parametrize("mode", MODES)
def test_graphs_and_filters_change_nothing(tiny_folder: Folder, mode: str) -> None:
    """Captured, and eagerly by the reference's own ops in float32: the same records for the same tokens."""
    place = tiny_folder("qwen3", "float32")
    engine = opened(place, logprobs_mode=mode)
    assert engine.machine.replay is not None
    found = generate(engine, PROMPTS, EACH, progress=False)
    eager = generate(opened(place, logprobs_mode=mode, eager=True, ops="reference"), PROMPTS, EACH, progress=False)
    for mine, theirs, params in zip(found, eager, EACH, strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None) == (params.logprobs is None)
            if a.output_ids == b.output_ids:  # a near tie may go the other way
                close(a.logprobs or (), b.logprobs or (), 1e-3)
        close(mine.prompt_logprobs or (), theirs.prompt_logprobs or (), 1e-3)
    assert sum(a.output_ids == b.output_ids for a, b in zip(found, eager, strict=True)) > len(EACH) // 2


def test_raw_ones_are_those_of_a_prefill(tiny_folder: Folder) -> None:
    """What was said of each token of the output is what `score` says of the whole sequence."""
    engine = opened(tiny_folder("qwen3", "float32"))
    for result, params in zip(generate(engine, PROMPTS, EACH, progress=False), EACH, strict=True):
        for output in result.outputs if params.logprobs is not None else ():
            (whole,) = score(engine, [[*result.prompt_ids, *output.output_ids]])
            said = [one.logprob for one in output.logprobs or ()]
            np.testing.assert_allclose(said, whole.logprobs[len(result.prompt_ids) - 1 :], atol=1e-3)


@pytest.mark.parametrize("k", [0, 5, 20])
def test_judging_equals_the_cpu_and_never_waits(k: int, never_waiting: Context) -> None:
    """For logits full of ties, of a vocabulary of Qwen's size; while the device is busy it returns at once."""
    draw = torch.Generator().manual_seed(k)
    logits = torch.randn((130, 151_936), generator=draw).bfloat16().float()
    tokens = torch.randint(0, 151_936, (130,), generator=draw)
    want = judged(judge(logits, tokens, k).numpy())
    on, said = logits.cuda(), tokens.cuda()
    judge(on, said, k)
    with never_waiting():
        block = judge(on, said, k)
    found = judged(block.cpu().numpy())
    assert found.ranks.tolist() == want.ranks.tolist()
    assert found.top_ids.tolist() == want.top_ids.tolist()
    np.testing.assert_allclose(found.logprobs, want.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, want.top_logprobs, atol=1e-5)


def test_graphs_stay_valid_when_weights_are_swapped(tiny_folder: Folder) -> None:
    """The answers of captured graphs are the new weights', and the old ones' again after a swap back."""
    engine = opened(tiny_folder("qwen3", "float32"))
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    first = [r.output_ids for r in generate(engine, PROMPTS, greedy, progress=False)]
    old = opened(tiny_folder("qwen3", "float32"), num_blocks=40, max_num_seqs=1).machine.weights
    other = opened(tiny_folder("qwen3", "float32"), num_blocks=40, max_num_seqs=1).machine.weights
    other.norm.neg_()
    swap_weights(engine, other)
    second = [r.output_ids for r in generate(engine, PROMPTS, greedy, progress=False)]
    swap_weights(engine, old)
    assert second != first
    assert [r.output_ids for r in generate(engine, PROMPTS, greedy, progress=False)] == first
