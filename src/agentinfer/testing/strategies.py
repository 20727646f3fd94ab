"""Hypothesis strategies: engines small enough that everything is short, requests that share and stop and never fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from agentinfer.state.blocks import BlockHash, block_hash
from agentinfer.state.ids import SeqId
from agentinfer.state.limits import Limits
from agentinfer.state.policy import POLICIES, Policy
from agentinfer.state.request import Request, SamplingParams
from agentinfer.testing.ghost import Script
from agentinfer.testing.oracle import SPREAD

VOCAB = 16
"""Twice what the model likes to choose among, so that tokens can be banned and be out of its habit."""


NOISE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    {"temperature": 1.0, "top_k": -1, "min_p": 0.05},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logits_processors": "mine"},
)
"""Sampling parameters that a plan has to carry along; the ghost's model does not heed them."""

_SEEDS = st.sampled_from([None, None, 0, 1, 2**63 - 1])
_JUDGED = st.sampled_from([None, None, None, 0, 2])
_STOPS = st.one_of(st.just(()), st.sets(st.integers(0, SPREAD), max_size=6).map(tuple))
_SALTS = st.sampled_from([None, None, None, None, "", "a", "b"])


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Sizes of an engine in which blocks, rows and budget all run short."""
    block_size = draw(st.sampled_from([2, 1, 3, 4]))
    num_blocks = draw(st.integers(2, 14))
    slots = block_size * num_blocks
    return Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=draw(st.sampled_from([3, 1, 2, 4, 6])),
        max_num_batched_tokens=draw(st.sampled_from([8, 1, 2, 3, 5, 12])),
        max_model_len=draw(st.integers(max(2, slots // 2), min(slots + 3, 32))),
        vocab_size=VOCAB,
        eos_ids=draw(st.sampled_from([(), (0,), (3, 5)])),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        seed=draw(st.sampled_from([0, 1])),
    )


@st.composite
def sampling_params(draw: st.DrawFn, room: int) -> SamplingParams:
    """Parameters of a request whose prompt leaves *room* tokens of max_model_len; at times too much is asked."""
    max_tokens = draw(st.one_of(st.none(), st.integers(1, max(room, 1)), st.integers(1, max(room, 1))))
    if max_tokens == 1 and draw(st.integers(0, 9)) == 9:
        max_tokens = room + 1
    most = room if max_tokens is None else max_tokens
    noise = draw(st.sampled_from(NOISE))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])) if noise["temperature"] else 1,
        max_tokens=max_tokens,
        seed=draw(_SEEDS),
        stop_token_ids=draw(_STOPS),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max(min(most, 6), 0))) if draw(st.booleans()) else 0,
        logprobs=draw(_JUDGED),
        prompt_logprobs=draw(_JUDGED),
        **noise,
    )


@st.composite
def requests(draw: st.DrawFn, limits: Limits, earlier: Sequence[tuple[int, ...]] = ()) -> Request:
    """A request to an engine of *limits*, often one that goes on from a prefix of one of the *earlier* sequences."""
    start: tuple[int, ...] = ()
    if earlier and draw(st.booleans()):
        base = draw(st.sampled_from(earlier))
        start = base[: draw(st.integers(0, min(len(base), limits.max_model_len - 1)))]
    longest = min(limits.max_model_len - 1 - len(start), 12)
    prompt = (*start, *draw(st.lists(st.integers(0, 1), min_size=0 if start else 1, max_size=max(longest, 1))))
    if len(prompt) == 1 and draw(st.integers(0, 9)) == 9:
        prompt = draw(st.sampled_from([(), (VOCAB,), (0,) * limits.max_model_len]))
    params = draw(sampling_params(room=max(limits.max_model_len - len(prompt), 0)))
    return Request(prompt, params, salt=draw(_SALTS))


@st.composite
def drafts(draw: st.DrawFn, scripts: Iterable[Script]) -> dict[SeqId, tuple[int, ...]]:
    """Guesses at the next tokens of each of *scripts*: so many right ones, then whatever."""
    found: dict[SeqId, tuple[int, ...]] = {}
    for script in scripts:
        right = script.answer.tokens[script.known : script.known + draw(st.integers(0, 5))]
        found[script.seq] = (*right, *draw(st.lists(st.integers(0, SPREAD), max_size=3)))
    return found


def policies() -> st.SearchStrategy[Policy]:
    """The policies that come with the package."""
    return st.sampled_from(list(POLICIES.values()))


def constant_hash(_seed: int, _parent: int, _salt: str | None, _tokens: tuple[int, ...]) -> int:
    """Every block has the same hash: only the comparison of tokens is left to tell them apart."""
    return 7


def sum_hash(_seed: int, parent: int, _salt: str | None, tokens: tuple[int, ...]) -> int:
    """Blocks of the same tokens in another order, and the same of another salt, have the same hash."""
    return (parent + sum(tokens)) % 11


HASHES: tuple[BlockHash, ...] = (block_hash, constant_hash, sum_hash)
"""The engine's own, and two that collide."""
