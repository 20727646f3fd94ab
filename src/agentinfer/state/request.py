"""What a client asks for. Never changes once made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from attrs import Attribute, field, frozen

from agentinfer.errors import InvalidRequest
from agentinfer.state.ids import tupled
from agentinfer.state.structured import StructuredOutputsParams, structured


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    """A finite float in [low, high], or (low, high] if *open_low*."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high or (open_low and value == low):
            raise InvalidRequest(
                attribute.name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], not {value!r}"
            )

    return check


def _integer(low: int, high: int, *, optional: bool = False) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequest(attribute.name, f"must be an integer in [{low}, {high}], not {value!r}")

    return check


def _instance(kind: type, *, optional: bool = False) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind) and not (optional and value is None):
            raise InvalidRequest(attribute.name, f"must be a {kind.__name__}, not {value!r}")

    return check


def _token_ids(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not tuple:
        raise InvalidRequest(attribute.name, f"must be token ids, not {value!r}")
    for i, token in enumerate(cast("tuple[Any, ...]", value)):
        if type(token) is not int or not 0 <= token < 2**31:
            raise InvalidRequest(attribute.name, f"item {i} is no token id: {token!r}")


def _texts(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not tuple:
        raise InvalidRequest(attribute.name, f"must be a text or a list of texts, not {value!r}")
    for i, words in enumerate(cast("tuple[Any, ...]", value)):
        if not isinstance(words, str) or not words:
            raise InvalidRequest(attribute.name, f"item {i} must be a text of at least one character, not {words!r}")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tupled(value)


def _optional(value: Any) -> Any:
    return None if value is None else tupled(value)


def _words(value: Any) -> Any:
    """Texts as they are, token sequences as tuples."""
    many: tuple[Any, ...] = _one_or_many(value)
    return tuple(x if isinstance(x, str) else tupled(x) for x in many) if type(many) is tuple else many


def _texts_or_tokens(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not tuple:
        raise InvalidRequest(attribute.name, f"must be a list of texts, or of token sequences, not {value!r}")
    for i, words in enumerate(cast("tuple[Any, ...]", value)):
        if type(words) is tuple:
            _token_ids(None, attribute, words)
        if not isinstance(words, str | tuple) or words in ("", ()):
            raise InvalidRequest(attribute.name, f"item {i} must be a text, or token ids, and not empty: {words!r}")


def _pairs(value: Any) -> Any:
    """A mapping from token ids, which JSON writes as texts, as pairs in the order of the ids."""
    given = cast("Mapping[Any, Any]", value).items() if isinstance(value, Mapping) else value
    pairs: Any = tupled(given)
    try:
        read: list[tuple[Any, Any]] = [(_id_of(token), bias) for token, bias in pairs]
        return tuple(sorted(read, key=lambda pair: pair[0]))
    except (TypeError, ValueError):  # for the validator to refuse
        return pairs


def _id_of(token: Any) -> Any:
    return int(token) if isinstance(token, str) and token.removeprefix("-").isdecimal() else token


def _biases(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not tuple:
        raise InvalidRequest(attribute.name, f"must map token ids to numbers, not {value!r}")
    before = -1
    for pair in cast("tuple[Any, ...]", value):
        if type(pair) is not tuple or len(cast("tuple[Any, ...]", pair)) != 2:
            raise InvalidRequest(attribute.name, f"must map token ids to numbers; {pair!r} is no pair of them")
        token, bias = cast("tuple[Any, Any]", pair)
        if type(token) is not int or not 0 <= token < 2**31:
            raise InvalidRequest(attribute.name, f"{token!r} is no token id")
        if token == before:
            raise InvalidRequest(attribute.name, f"names token id {token} twice")
        good = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not good or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                attribute.name, f"of token id {token} must be in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}], not {bias!r}"
            )
        before = token


def _some_token_ids(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None:
        _token_ids(None, attribute, value)
        if not value:
            raise InvalidRequest(attribute.name, "is empty, so no token could be chosen; None allows all")


_I31 = 2**31 - 1
_MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-5
"""Temperatures below it choose the largest logit."""
MAX_N = 16_384
"""Completions of one prompt, at most."""
MAX_STOP_TOKEN_IDS = 256
"""Stop ids are compared in columns, a column a stop id: so many at most."""
MAX_LOGIT_BIAS = 100
"""A bias is at most so large, either way: as in the OpenAI API."""


@frozen
class SamplingParams:
    """How to choose tokens, with the names, defaults and ranges of vLLM where both have them.

    Raises InvalidRequest naming the field.
    """

    n: int = field(default=1, validator=_integer(1, MAX_N))
    """Completions of one prompt: each is what a request of its own with the seed `child_seed(seed, j)` would give."""
    max_tokens: int | None = field(default=None, validator=_integer(1, _I31, optional=True))
    """Tokens to generate at most; None: to the end of `max_model_len`."""
    temperature: float = field(default=1.0, validator=_number(0.0, 1e6))
    """0 is greedy; so is anything below 1e-5."""
    top_p: float = field(default=1.0, validator=_number(0.0, 1.0, open_low=True))
    top_k: int = field(default=0, validator=_integer(-1, _I31))
    """0 or -1: off."""
    min_p: float = field(default=0.0, validator=_number(0.0, 1.0))
    seed: int | None = field(default=None, validator=_integer(0, _MAX_SEED, optional=True))
    """None: drawn from the engine's own seed and the sequence's number."""
    presence_penalty: float = field(default=0.0, validator=_number(-2.0, 2.0))
    """Taken off the logit of every token that is in the output."""
    frequency_penalty: float = field(default=0.0, validator=_number(-2.0, 2.0))
    """Taken off a logit as many times as its token is in the output."""
    repetition_penalty: float = field(default=1.0, validator=_number(1e-6, 1e6))
    """Of every token that is in the prompt or the output: its logit is divided by it, or multiplied if negative."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_pairs, validator=_biases)
    """Given as a mapping from token ids to what is added to their logits."""
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_optional, validator=_some_token_ids)
    """No others are chosen, end tokens included; None: all may be."""
    bad_words: tuple[str | tuple[int, ...], ...] = field(default=(), converter=_words, validator=_texts_or_tokens)
    """Texts, or token sequences, that the output is not to hold: the token that would complete one is not chosen.
    `Engine.add` turns texts into token sequences, with and without a space before them.
    """
    logits_processors: tuple[str, ...] = field(default=(), converter=_one_or_many, validator=_texts)
    """Names of functions that the engine was opened with, applied in this order."""
    structured_outputs: StructuredOutputsParams | None = field(default=None, converter=structured)
    """The form that the output must have."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tupled, validator=_token_ids)
    ignore_eos: bool = field(default=False, validator=_instance(bool))
    """Keep on after the model's own end tokens; `stop_token_ids` still stop."""
    min_tokens: int = field(default=0, validator=_integer(0, _I31))
    """Tokens to generate before an end or stop token can be chosen, or a stop string counts; end tokens that
    `ignore_eos` ignores can be.
    """
    stop: tuple[str, ...] = field(default=(), converter=_one_or_many, validator=_texts)
    """Texts that end the output where they first appear in it, wherever its tokens begin and end."""
    include_stop_str_in_output: bool = field(default=False, validator=_instance(bool))
    """Show the stop string, or the text of the end or stop token, too."""
    logprobs: int | None = field(default=None, validator=_integer(0, _I31, optional=True))
    """Say how likely each token was, and so many of the likeliest ones beside it: at most Limits.max_logprobs."""
    prompt_logprobs: int | None = field(default=None, validator=_integer(0, _I31, optional=True))
    """The same of each token of the prompt but the first. All of it is then computed: its KV is not looked for."""
    skip_special_tokens: bool = field(default=True, validator=_instance(bool))
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = field(default=True, validator=_instance(bool))
    """Where they are not left out: with the spaces that some tokenizers put between tokens."""

    def __attrs_post_init__(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("stop_token_ids", f"has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise InvalidRequest("n", f"must be 1 for greedy sampling, which has one answer, not {self.n}")
        if self.ignore_eos and self.structured_outputs is not None:
            raise InvalidRequest("ignore_eos", "can not be together with structured_outputs: what is complete must end")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens {self.max_tokens}")


def bad_tokens(params: SamplingParams) -> list[tuple[int, ...]]:
    """The token sequences among the bad words."""
    return [words for words in params.bad_words if not isinstance(words, str)]


def biased(params: SamplingParams) -> bool:
    """Whether what is added to the logits is known from the start: a bias, or ids that are never chosen."""
    return bool(params.logit_bias) or params.allowed_token_ids is not None or bool(params.bad_words)


def penalised(params: SamplingParams) -> bool:
    """Whether the logits depend on which tokens the sequence holds."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def edits_logits(params: SamplingParams) -> bool:
    """Whether the logits are changed in any way before temperature, but for end tokens before `min_tokens`."""
    return biased(params) or penalised(params) or needs_host(params)


def needs_host(params: SamplingParams) -> bool:
    """Whether the logits of a token can not be edited before the host knows the token before."""
    asks = params.structured_outputs is not None or bool(params.logits_processors)
    return asks or any(len(words) > 1 for words in bad_tokens(params))


@frozen
class Request:
    """A prompt and how to continue it. Raises InvalidRequest naming the field."""

    prompt: tuple[int, ...] = field(converter=tupled, validator=_token_ids)
    params: SamplingParams = field(default=SamplingParams(), validator=_instance(SamplingParams))
    salt: str | None = field(default=None, validator=_instance(str, optional=True))
    """Prefix-cache domain: sequences share cached blocks only with those of an equal salt; None differs from ""."""


def check_seeds(seeds: Any) -> None:
    """Raises InvalidRequest unless *seeds* is a tuple of what SamplingParams takes as its seed."""
    if type(seeds) is not tuple:
        raise InvalidRequest("seeds", f"must be a seed a child, not {seeds!r}")
    for i, seed in enumerate(cast("tuple[Any, ...]", seeds)):
        if seed is not None and (type(seed) is not int or not 0 <= seed <= _MAX_SEED):
            raise InvalidRequest("seeds", f"item {i} must be an integer in [0, {_MAX_SEED}], not {seed!r}")
