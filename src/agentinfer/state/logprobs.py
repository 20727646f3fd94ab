"""How likely the model found tokens: columns as they come from a device, and one record a token.

Nothing that is decided depends on them: they pass through the control plane with the tokens, and no state holds them.
N tokens judged, K likeliest tokens beside each.
"""

from __future__ import annotations

from attrs import frozen

from agentinfer.state.ids import F32, I32, ints


@frozen
class TokenLogprobs:
    """How likely the model found the token of one place, and which tokens it found likeliest there."""

    token_id: int
    """The token that stands there: of an output, the one that was sampled."""
    logprob: float
    rank: int
    """Its place among all tokens, 1 for the likeliest; of equal ones the lowest id first."""
    top_ids: tuple[int, ...]
    """As many as were asked for, likeliest first; of equal ones the lowest id first. `token_id` may be among them."""
    top_logprobs: tuple[float, ...]
    """Theirs."""


@frozen(eq=False)
class Judged:
    """The same of N tokens."""

    logprobs: F32
    """[N]; NaN where the logits hold NaN."""
    ranks: I32
    """[N]"""
    top_ids: I32
    """[N, K]"""
    top_logprobs: F32
    """[N, K]"""


def records(judged: Judged, tokens: list[int], wanted: list[int]) -> list[TokenLogprobs]:
    """A record for each of the N *tokens* judged, with the *wanted* likeliest of each, at most K."""
    ids, values = ints(judged.top_ids), judged.top_logprobs.tolist()
    columns = (tokens, judged.logprobs.tolist(), ints(judged.ranks), ids, values, wanted)
    return [
        TokenLogprobs(token, logprob, rank, tuple(best[:k]), tuple(theirs[:k]))
        for token, logprob, rank, best, theirs, k in zip(*columns, strict=True)
    ]
