"""What clients may ask: bodies read and checked, fields of the API turned into SamplingParams.

A field is one of: known to the endpoint; the name of a field of SamplingParams; known elsewhere but not supported
(UNSUPPORTED), which is refused unless its value asks for nothing; or any other, which is accepted and ignored with one
warning, as in vLLM: unknown ones, and those by which other servers keep accounts, such as `user` and `store`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import attrs
import msgspec
from msgspec import Struct

from agentinfer.errors import InvalidRequest
from agentinfer.loop import SamplingParams
from agentinfer.server.problems import Problem, invalid

Ids = list[int]

SAMPLING: Final = frozenset(field.name for field in attrs.fields(SamplingParams)) - {"logprobs", "prompt_logprobs"}
"""Fields of SamplingParams that have the same name and meaning in the API."""
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "early_stopping": (False,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logprob_token_ids": (),
        "media_io_kwargs": (),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "prediction": (),
        "priority": (0,),
        "prompt_embeds": (),
        "repetition_detection": (),
        "return_tokens_as_token_ids": (False,),
        "suffix": ("",),
        "structured_outputs": (),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
"""What would change an answer and can not be done, with the values that ask for nothing; null always does."""


class StreamOptions(Struct, frozen=True):
    """Which usage a stream says. Immutable."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionBody(Struct, frozen=True):
    """Of `POST /v1/completions`. Immutable."""

    prompt: Any
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(Struct, frozen=True):
    """Of `POST /v1/chat/completions`. Immutable."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None


class GenerateBody(Struct, frozen=True):
    """Of `POST /generate`: token ids in, token ids out. Immutable."""

    token_ids: Ids
    sampling_params: dict[str, Any] = {}  # msgspec copies it
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class TokenizeBody(Struct, frozen=True):
    """Of `POST /tokenize`: a prompt, or messages. Immutable."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True):
    """Of `POST /detokenize`. Immutable."""

    tokens: Ids
    model: str | None = None


SENT_AS: Final[Mapping[type[Struct], Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        CompletionBody: {
            "n": ("n", "prompt"),
            "prompt_logprobs": ("prompt_logprobs", "logprobs"),
            "structured_outputs": ("structured_outputs", "response_format"),
        },
        ChatBody: {
            "prompt": ("messages",),
            "logprobs": ("top_logprobs",),
            "max_tokens": ("max_completion_tokens", "max_tokens"),
            "structured_outputs": ("structured_outputs", "response_format", "tools"),
        },
        GenerateBody: {"prompt": ("token_ids",)},
    }
)
"""The fields of a body that the engine's field of that name is made of: of those that are there, the first."""
_ASKS_NOTHING: Final[tuple[Any, ...]] = (None, {"type": "text"})

Body = TypeVar("Body", bound=Struct)


def read_json(body: bytes) -> dict[str, Any]:
    """The object in *body*. Raises Problem."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is no JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise invalid(None, f"the body must be a JSON object, not {type(found).__name__}")
    return cast(dict[str, Any], found)


def read_body(raw: Mapping[str, Any], kind: type[Body]) -> Body:
    """*raw* as a *kind*. Raises Problem naming the field that is missing or of another type."""
    present = {name: value for name, value in raw.items() if value is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from error


def _wrong(said: str) -> Problem:
    """The problem in msgspec's words: 'Expected `int`, got `str` - at `$.max_tokens`'."""
    what, _, where = said.partition(" - at `$.")
    path = where.rstrip("`")
    if "missing required field" in what:
        field = what.split("`")[1]
        return invalid(".".join(filter(None, (path, field))), f"{field}: is missing")
    param = path.split(".")[0].split("[")[0] or None
    return invalid(param, f"{path}: {what}" if path else what)


def unknown_fields(raw: Mapping[str, Any], kind: type[Struct], also: frozenset[str] = SAMPLING) -> list[str]:
    """The fields of *raw* that have no effect. Raises Problem for those that should have one."""
    own = {field.name for field in msgspec.structs.fields(kind)} | also
    unknown: list[str] = []
    for name, value in raw.items():
        if name in own or value is None:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif value not in UNSUPPORTED[name]:
            raise invalid(name, f"{name}: is not supported")
    return unknown


def names_of(raw: Mapping[str, Any], kind: type[Struct]) -> dict[str, str]:
    """What the client calls the fields of the engine that have another name in *raw*, a body of this *kind*."""
    names = {
        name: next((field for field in fields if raw.get(field) not in _ASKS_NOTHING), name)
        for name, fields in SENT_AS.get(kind, {}).items()
    }
    nested = cast(dict[str, Any], raw["sampling_params"]) if raw.get("sampling_params") and kind is GenerateBody else {}
    return names | {name: f"sampling_params.{name}" for name in nested}


def sampling_of(raw: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The fields of *raw* that say how to sample; *more* overrules them. Raises Problem naming the field."""
    given = {name: value for name, value in raw.items() if name in SAMPLING and value is not None}
    if "structured_outputs" in given and more.get("structured_outputs") is not None:
        raise invalid("structured_outputs", "structured_outputs: response_format or tool_choice asks for another form")
    given |= more
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        raise Problem(400, str(error), param=error.field) from error


_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _biases(given: object) -> dict[int, float]:
    """Keys of JSON are texts. Raises Problem."""
    if not isinstance(given, dict):
        raise invalid("logit_bias", "logit_bias: must be an object from token ids to numbers")
    biases: dict[int, float] = {}
    for key, value in cast(dict[str, Any], given).items():
        if not _TOKEN_ID.fullmatch(key):
            raise invalid("logit_bias", f"logit_bias: {key!r} is no token id")
        biases[int(key)] = value
    return biases


def prompts_of(prompt: object) -> tuple[list[str | list[int]], bool]:
    """The prompts of a completion, and whether they are a list: a text, token ids, or a list of either.

    Raises Problem.
    """
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "prompt: must be a text, token ids, or a list of these that is not empty")
    items = cast(list[Any], prompt)
    if all(type(item) is int for item in items):
        return [items], False
    for i, item in enumerate(items):
        ids = isinstance(item, list) and all(type(x) is int for x in cast(list[Any], item))
        if not ids and not isinstance(item, str):
            raise invalid("prompt", f"prompt: item {i} is neither a text nor a list of token ids")
    return items, True


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """The options of a stream. Raises Problem if they are given without one."""
    if options is not None and not stream:
        raise invalid("stream_options", "stream_options: only with stream=true")
    return options if options is not None else StreamOptions()
