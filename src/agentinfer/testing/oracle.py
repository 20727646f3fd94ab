"""What is right, in the fewest lines: a model that is a hash, and an engine that serves one request alone.

Knows requests and limits. Knows nothing of rows, blocks, steps or policies, so it can not share their faults.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from agentinfer.state.limits import Limits
from agentinfer.state.request import Request
from agentinfer.state.sequence import FinishReason

SPREAD = 8
"""Token ids that the model likes to choose among: few, so that stop ids and repetitions come up."""

_MASK = 2**64 - 1


def root(salt: str | None) -> int:
    """The fingerprint of the empty prefix in the cache domain of *salt*."""
    return 1 if salt is None else _mix(int.from_bytes(b"salt" + salt.encode("utf-8", "surrogatepass"), "little"))


def extend(print_: int, token: int) -> int:
    """The fingerprint of a prefix and one token more: what a KV slot holds."""
    return _mix(print_ * 6364136223846793005 + token + 1)


def prints(salt: str | None, tokens: Collection[int]) -> list[int]:
    """The fingerprint of every prefix of *tokens*, the one of a single token first."""
    found: list[int] = []
    at = root(salt)
    for token in tokens:
        at = extend(at, token)
        found.append(at)
    return found


def choose(print_: int, seed: int, index: int, banned: Collection[int], vocab_size: int) -> int:
    """The model: the next token is a function of the prefix, the seed and the output index alone.

    The first token from there on that is not *banned*. Raises ValueError if all are.
    """
    first = _mix(print_ ^ _mix(seed * 2 + 1) ^ _mix(index * 2)) % SPREAD
    for i in range(vocab_size):
        if (token := (first + i) % vocab_size) not in banned:
            return token
    raise ValueError(f"every token of a vocabulary of {vocab_size} is banned")


def _mix(x: int) -> int:
    x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return x ^ (x >> 32)


@frozen
class Answer:
    """How a sequence must end if nothing disturbs it."""

    tokens: tuple[int, ...]
    """Prompt and output."""
    reason: FinishReason
    stopped_by: int | None
    """The end or stop token."""


def limit(limits: Limits, request: Request) -> int:
    """The length in tokens at which *request* ends."""
    wanted = request.params.max_tokens
    return limits.max_model_len if wanted is None else len(request.prompt) + wanted


def refused(limits: Limits, request: Request) -> bool:
    """Whether *request* can never be served. It writes one KV slot less than it has tokens."""
    ids = (*request.prompt, *request.params.stop_token_ids)
    longest = limit(limits, request)
    return (
        not request.prompt
        or len(request.prompt) >= limits.max_model_len
        or longest > limits.max_model_len
        or len(request.prompt) + request.params.min_tokens > longest
        or longest - 1 > limits.num_blocks * limits.block_size
        or any(token >= limits.vocab_size for token in ids)
        or (request.params.min_tokens > 0 and len(stops(limits, request)) == limits.vocab_size)
    )


def stops(limits: Limits, request: Request) -> frozenset[int]:
    """The tokens that end *request*."""
    model = () if request.params.ignore_eos else limits.eos_ids
    return frozenset((*request.params.stop_token_ids, *model))


def answer(limits: Limits, request: Request, seed: int, tokens: tuple[int, ...]) -> Answer:
    """Serve *request*, of which *tokens* are known already, alone and without a cache."""
    ends, out = stops(limits, request), list(tokens)
    at = prints(request.salt, tokens)[-1]
    while True:
        index = len(out) - len(request.prompt)
        token = choose(at, seed, index, ends if index < request.params.min_tokens else (), limits.vocab_size)
        out.append(token)
        at = extend(at, token)
        if token in ends:
            return Answer(tuple(out), "stop", token)
        if len(out) >= limit(limits, request):
            return Answer(tuple(out), "length", None)
