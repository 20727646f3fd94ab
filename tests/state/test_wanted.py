"""Which log-probabilities a step has to find, against the few lines that say so."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.state.wanted import MOST_LOGITS, fewer, most_scored
from engines import Hand, limits, request

POSITIONS = st.integers(0, 40)


@given(POSITIONS, st.integers(1, 40), POSITIONS, st.integers(0, 20))
def test_a_row_computes_as_much_as_may_be_judged(start: int, count: int, scored: int, room: int) -> None:
    """All of it, or its first positions, with no more judged ones among them than there is room for."""
    n, left = fewer(start, count, scored, room)
    judged = [p for p in range(start, start + n) if p < scored]
    assert len(judged) == room - left <= room
    assert n == count or len(judged) == room == n
    all_judged = [p for p in range(start, start + count) if p < scored]
    assert (n == count) == (len(all_judged) <= room)


def test_a_step_has_few_logits_of_prompts() -> None:
    """220 positions of Qwen's vocabulary, 134 MB; one at least, whatever the vocabulary."""
    assert most_scored(limits(vocab_size=151_936)) == 220
    assert most_scored(limits(vocab_size=MOST_LOGITS + 1)) == 1


def test_a_plan_says_which_tokens_of_which_prompts_it_judges() -> None:
    """Chunk by chunk, beside decodes and rows that want nothing; after the last token of a prompt it samples."""
    hand = Hand.of(limits(max_num_batched_tokens=8), request([1, 2], 9))
    hand.step()
    hand.arrive(request(range(10, 20), 2, prompt_logprobs=3, logprobs=1))
    found = list[tuple[list[int], ...]]()
    for _ in range(3):
        plan, _ = hand.step()
        wanted = [] if plan.logprobs is None else plan.logprobs.tolist()
        judged = () if plan.scored is None else (plan.scored.samples.tolist(), plan.scored.positions.tolist())
        found.append((plan.count.tolist(), wanted, *judged))
        if plan.scored is not None:
            assert plan.scored.tokens.tolist() == [10 + p for p in plan.scored.positions.tolist()]
            assert set(plan.scored.top.tolist()) == {3}
            assert plan.inputs[plan.scored.samples].tolist() == [9 + p for p in plan.scored.positions.tolist()]
    assert found == [
        ([1, 7], [], list(range(1, 8)), list(range(1, 8))),
        ([1, 3], [-1, 1], [1, 2], [8, 9]),
        ([1, 1], [-1, 1]),
    ]
    plan = hand.plan()
    assert plan.logprobs is None
    assert np.array_equal(plan.seqs, [0])
