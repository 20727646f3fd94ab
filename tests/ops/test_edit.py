"""Logits before temperature: bias, bans, masks and penalties, against worked cases and a plain pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import draws
from agentinfer.ops import edit
from agentinfer.ops.provide import reference
from agentinfer.ops.sample import sample
from agentinfer.sampling import Host, Ready, choose_edited, completing, stage_edits
from agentinfer.state.columns import PARAMS
from agentinfer.state.ids import Row, SeqId
from agentinfer.state.plan import Edit, Plan, SamplingColumns, Told
from agentinfer.state.request import Request, SamplingParams, edits_logits, needs_host
from plain import edited_plainly

CPU = torch.device("cpu")
VOCAB = 37
inf = float("inf")


def told(row: int, prompt: Sequence[int], output: Sequence[int] = (), **params: Any) -> Told:
    request = Request(tuple(prompt), SamplingParams(**params))
    return Told(Row(row), request, (*prompt, *output))


def tables(*rows: Told, vocab: int = VOCAB) -> edit.EditTables:
    return edit.tell(edit.no_tables(vocab, CPU), rows)


def places(*samples: tuple[int, int, int], bans: Sequence[Sequence[int]] = ()) -> edit.EditInputs:
    """Of each: its row of logits, that of the bias, that of the counts."""
    return draws.edit_inputs(*zip(*samples, strict=True), bans)


# --- worked cases ---------------------------------------------------------------------------------------------------


def test_the_worked_case_of_penalties() -> None:
    """Repetition over prompt and output, once; then presence, and frequency times the count, over the output only."""
    known = tables(
        told(2, [1, 1, 2], [3, 3], repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25), vocab=6
    )
    logits = torch.tensor([[9.0] * 6, [2.0, 1.0, -1.0, 0.5, -0.5, 0.0]])
    after = edit.edit_rows(logits, places((1, -1, 2), (0, -1, -1)), known)
    assert after.tolist() == [[2.0, 0.5, -2.0, -0.75, -0.5, 0.0], [9.0] * 6]


def test_what_is_chosen_is_counted_as_what_was_told() -> None:
    """Told [3, 3], or having entered 3 twice: the same counts; other tokens, too, are where they are looked for."""
    asked = {"repetition_penalty": 2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    known = tables(told(1, [1, 1, 2], **asked), told(4, [5], [5], presence_penalty=1), vocab=6)
    chosen, last = torch.full((2, 5), 9), torch.full((6,), 9)
    x = draws.edit_inputs([0, 1, 2], [-1, 2, -1], [4, -1, 1], samples=[0, 1, 3], rows=[4, 2, 1])
    for _ in range(2):
        edit.enter_rows(torch.tensor([[0, 7, 3], [1, 0, 1]]), x, chosen, last, known)
    assert (chosen.tolist(), last.tolist()) == ([[0, 7, 9, 3, 9], [1, 0, 9, 1, 9]], [9, 3, 7, 9, 0, 9])
    other = tables(told(1, [1, 1, 2], [3, 3], **asked), told(4, [5], [5, 0, 0], presence_penalty=1), vocab=6)
    assert torch.equal(known.counts, other.counts)
    assert known.counts[4].tolist() == [4, 0, 0, 0, 0, 3]


def test_a_bias_of_100_forces_and_one_of_minus_100_removes() -> None:
    """In a row of usual logits; the row beside it is untouched, bit for bit."""
    known = tables(told(1, [0], logit_bias={5: 100}), told(2, [0], logit_bias={5: -100}), vocab=96)
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)) * 5
    logits[2, 5] = 40.0
    before = logits.clone()
    after = edit.edit_rows(logits, places((0, 1, -1), (1, -1, -1), (2, 2, -1)), known)
    assert int(after[0].argmax()) == 5
    assert float(after[2, 5]) == -60
    assert torch.equal(after[1], before[1])
    assert torch.equal(logits, before)


def test_a_row_that_is_given_again_forgets() -> None:
    """What the row before was told and counted is gone; other rows keep theirs, also when the tables grow."""
    known = tables(told(1, [0], [3], logit_bias={5: 100}, presence_penalty=1), told(2, [1], presence_penalty=1))
    known = edit.tell(known, [told(1, [4], logit_bias={6: 1}, presence_penalty=1)])
    known = edit.tell(known, [told(9, [2], presence_penalty=1)])
    assert known.bias[1].nonzero().flatten().tolist() == [6]
    assert known.counts[[1, 2, 9]].nonzero().tolist() == [[0, 4], [1, 1], [2, 2]]
    assert len(known.bias) < len(known.counts)  # nobody beyond row 1 asked for a bias


def test_tables_take_no_memory_before_somebody_asks() -> None:
    """Nothing is allocated for a request that asks for other things."""
    known = tables(told(3, [1], logits_processors="mine"))
    assert [known.bias.numel(), known.counts.numel(), known.penalties.numel()] == [0, 0, 0]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_a_mask_is_a_bit_a_token(vocab: int) -> None:
    """Token i is bit i % 32 of word i // 32, in words of any sign; the rows beside are untouched."""
    allowed = np.random.default_rng(vocab).random((2, vocab)) < 0.5
    bits = np.zeros((2, -(-vocab // 32) * 32), np.uint32)
    bits[:, :vocab] = allowed
    words = (bits.reshape(2, -1, 32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    after = edit.mask(torch.zeros(3, vocab), [2, 0], words).numpy()
    assert (after[[2, 0]] == np.where(allowed, 0, -inf)).all()
    assert not after[1].any()
    with pytest.raises(ValueError, match="tokens"):
        edit.mask(torch.zeros(3, vocab), [2, 0], np.zeros((2, words.shape[1] + 1), np.int32))


@pytest.mark.parametrize(
    ("words", "output", "want"),
    [
        ([(1, 2)], [], []),
        ([(1, 2)], [1], [2]),
        ([(1, 2)], [2, 1], [2]),
        ([(1, 2)], [1, 2], []),
        ([(1, 1, 1)], [1, 1], [1]),
        ([(1, 1, 1)], [1], []),
        ([(1, 2), (3, 1, 4), (5,)], [3, 1], [2, 4]),
        ([(0, 7), (7, 0)], [7, 0], [7]),
    ],
)
def test_a_bad_word_is_banned_where_it_would_be_completed(
    words: list[tuple[int, ...]], output: list[int], want: list[int]
) -> None:
    """The last token of a word, where the output ends with the others; a single token is no business of the step."""
    assert list(completing(words, output)) == want


# --- a plain pipeline -----------------------------------------------------------------------------------------------

ids = st.integers(0, VOCAB - 1)
penalty = st.sampled_from([0.0, 0.0, 2.0, -2.0, 0.3])
PROCESSORS = {
    "double": lambda _tokens, logits: logits * 2,
    "last": lambda tokens, logits: logits - (torch.arange(VOCAB) == tokens[-1]) * 3.5,
}


@st.composite
def rows(draw: st.DrawFn, row: int) -> tuple[Told, tuple[int, ...], Any, int]:
    """What is told of a row; end tokens held back; its mask; the seed of its raw logits."""
    few = st.lists(st.integers(0, 5), max_size=8)
    asked = told(
        row, draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)), draw(few),
        presence_penalty=draw(penalty), frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5, 1.3])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100, 100, 0.5, -2]), max_size=4)),
        allowed_token_ids=draw(st.one_of(st.none(), st.none(), st.sets(ids, min_size=20))),
        bad_words=draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3)),
        logits_processors=draw(st.sampled_from([(), (), ("double",), ("last",)])),
        temperature=draw(st.sampled_from([0.0, 1.0])), top_k=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    mask = np.array(draw(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB))) if draw(st.booleans()) else None
    return asked, draw(st.sampled_from([(), (), (0, 7)])), mask, draw(st.integers(0, 2**32))


def packed(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """One bit a token."""
    whole = np.zeros(-(-len(mask) // 32) * 32, np.bool_)
    whole[: len(mask)] = mask
    return np.packbits(whole, bitorder="little").view(np.int32)


def plan_of(asked: Sequence[Told], ended: Sequence[Sequence[int]]) -> Plan:
    """As much of a plan as sampling reads: one sample a row."""
    params = np.zeros(len(asked), PARAMS)
    for i, one in enumerate(asked):
        p = one.request.params
        params[i] = (p.temperature, p.top_p, p.min_p, p.top_k, p.seed, len(one.request.prompt), 0)
    index = np.array([len(one.tokens) - len(one.request.prompt) for one in asked], np.int32)
    banned = tuple((i, tuple(tokens)) for i, tokens in enumerate(ended) if tokens)
    none = np.zeros(0, np.int32)
    numbers = np.array([one.row for one in asked], np.int32)
    edits = tuple(
        Edit(i, one.row, SeqId(i), one.request) for i, one in enumerate(asked) if edits_logits(one.request.params)
    )
    return Plan(
        step=0, base=-1, rows=numbers, seqs=none, start=none, count=none, context=none, slots=none, inputs=none,
        samples=none, sample_rows=np.arange(len(asked), dtype=np.int32),
        sampling=SamplingColumns(params, index, banned), tables=(), copies=(), preempted=(), edits=edits,
    )  # fmt: skip


@given(st.data(), st.integers(1, 4))
def test_edits_and_choice_are_those_of_a_plain_pipeline(data: st.DataObject, count: int) -> None:
    """Any mix of rows and of what they ask for: the tokens of the rows edited one by one, whatever shares their batch;
    the raw logits are not written.
    """
    drawn = [data.draw(rows(row=2 * i + 1)) for i in range(count)]
    asked, ended = [one[0] for one in drawn], [one[1] for one in drawn]
    raw = torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(one[3])) * 4 for one in drawn])
    plan = plan_of(asked, ended)
    host = [needs_host(one.request.params) for one in asked]
    want = [
        edited_plainly(x, one.request, one.tokens, held, mask if late else None, PROCESSORS)
        for x, (one, held, mask, _), late in zip(raw, drawn, host, strict=True)
    ]
    tokens, ok = sample(
        torch.from_numpy(np.stack(want)), SamplingColumns(plan.sampling.params, plan.sampling.index, ())
    )
    ready = {
        i: Ready(one.tokens, tuple(completing(one.request.params.bad_words, one.tokens[len(one.request.prompt) :])),
                 None if mask is None else packed(mask))
        for i, ((one, _, mask, _), late) in enumerate(zip(drawn, host, strict=True)) if late
    }  # fmt: skip
    before = raw.clone()
    x = stage_edits(plan, range(count), np.arange(count), CPU)
    copy = edit.edit_rows(raw, x, tables(*asked))
    assert torch.equal(raw, before)
    chosen, broken = choose_edited(reference(), plan, x, copy, Host(PROCESSORS), ready)
    assert not broken
    np.testing.assert_array_equal(copy.numpy(), np.stack(want))
    assert chosen.tolist() == [tokens.tolist(), [int(x) for x in ok]]


@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.0, 1.3, 2.0]))
def test_repetition_and_bad_words_are_those_of_transformers(seed: int, penalty: float) -> None:
    """Of the same tokens, equal to its processors; its bad words look at the prompt too, so that is a token apart."""
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(seed)
    output = rng.integers(0, 4, rng.integers(0, 8)).tolist()
    words = [tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist()) for _ in range(3)]
    asked = told(1, [VOCAB - 1], output, repetition_penalty=penalty, bad_words=words)
    logits = torch.from_numpy(rng.normal(0, 4, (1, VOCAB)).astype(np.float32))
    ids = torch.tensor([asked.tokens])
    want = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    want = NoBadWordsLogitsProcessor([list(word) for word in words])(ids, want)
    banned = [*completing(words, output)]
    got = edit.edit_rows(logits, places((0, 1, 1 if penalty != 1 else -1), bans=[banned]), tables(asked))
    torch.testing.assert_close(got, want)
