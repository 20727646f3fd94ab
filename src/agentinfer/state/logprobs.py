"""How likely the model found a token. Nothing that is decided depends on it: it goes beside the tokens, and no state
holds it.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class TokenLogprobs:
    """How likely the model found the token of one place, and which tokens it found likeliest there."""

    token_id: int
    """The token that stands there: of an output, the one that was sampled."""
    logprob: float
    """NaN where the logits hold NaN."""
    rank: int
    """Its place among all tokens, 1 for the likeliest; of equal ones the lowest id first."""
    top_ids: tuple[int, ...]
    """As many as were asked for, likeliest first; of equal ones the lowest id first. `token_id` may be among them."""
    top_logprobs: tuple[float, ...]
    """Theirs."""
