"""Tools: what a client says of them, which of the parsers reads an answer, and calls as the API shows them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

from attrs import evolve, frozen

from agentinfer.parsers import FORMATS, Format, ToolCall
from agentinfer.server.problems import invalid
from agentinfer.server.structure import constrained, tools_schema
from agentinfer.text import Text

_DEEPSEEK: Final = "<\uff5ctool\u2581call\u2581begin\uff5c>"


@frozen
class Choice:
    """What a client wants of its tools."""

    tools: tuple[dict[str, Any], ...] = ()
    """Those that the model is told of."""
    forced: bool = False
    """The whole answer is one call."""
    params: Mapping[str, Any] = MappingProxyType({})
    """Fields of SamplingParams that make it so."""


def format_of(text: Text | None, name: str) -> Format | None:
    """The format called *name*; "auto": that of the tags in the chat template; "none": no format.

    Raises KeyError for an unknown name.
    """
    if name == "none" or text is None:
        return None
    if name != "auto":
        return FORMATS[name]
    source = "".join(text.templates.sources.values())
    reasons = "<think>" in source or "</think>" in source
    if _DEEPSEEK in source:
        return FORMATS["deepseek_r1" if reasons else "deepseek_v3"]
    if "<tool_call>" in source:
        return FORMATS["qwen3" if reasons else "hermes"]
    return None


def choice_of(tools: Sequence[dict[str, Any]] | None, wanted: str | Mapping[str, Any] | None) -> Choice:
    """What `tools` and `tool_choice` ask for. Raises Problem naming the field."""
    known = [_checked(i, tool) for i, tool in enumerate(tools or ())]
    if not known:
        if wanted not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice: there are no tools to choose from")
        return Choice()
    match wanted:
        case None | "auto":
            return Choice(tuple(known))
        case "none":
            return Choice()
        case "required":
            name = None
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case _:
            raise invalid("tool_choice", "tool_choice: must be none, auto, required, or name a function")
    return Choice(tuple(known), forced=True, params=constrained("tool_choice", {"json": tools_schema(known, name)}))


def _checked(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str(name), **more}} if name:
            if not isinstance(cast(Any, more).get("parameters"), dict | None):
                raise invalid("tools", f"tools: item {index}: parameters must be an object")
            return tool
        case _:
            raise invalid("tools", f"tools: item {index} must be a function that has a name")


def reading(form: Format, *, calls: bool) -> Format:
    """*form*; unless *calls* are looked for, what looks like one is content."""
    return form if calls else evolve(form, read=_none)


def _none(_body: str) -> None:
    return None


def tags_are_special(text: Text | None, form: Format) -> bool:
    """Whether *form* can be read only where special tokens are not left out."""
    tags = {*(form.think or ()), *form.call, *form.around}
    return text is not None and not tags.isdisjoint(text.special)


def forced_call(words: str) -> ToolCall | None:
    """The call that an answer under a schema of calls is; None: it was cut off."""
    try:
        found = json.loads(words)
        return ToolCall(found["name"], json.dumps(found["arguments"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        return None


def call_object(call: ToolCall) -> dict[str, Any]:
    """A call in a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def with_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """*messages*, for a template: the arguments of earlier calls are objects, not JSON text. Raises Problem."""
    return [_with_arguments(i, message) if message.get("tool_calls") else message for i, message in enumerate(messages)]


def _with_arguments(index: int, message: dict[str, Any]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    if not isinstance(message["tool_calls"], list):
        raise invalid("messages", f"messages: message {index}: tool_calls must be a list")
    for call in cast(list[Any], message["tool_calls"]):
        match call:
            case {"function": {"name": str(), "arguments": str(given)}}:
                try:
                    arguments = json.loads(given or "{}")
                except (ValueError, RecursionError) as error:
                    raise invalid("messages", f"messages: message {index}: arguments are no JSON: {error}") from error
                one = cast(dict[str, Any], call)
                calls.append({**one, "function": {**one["function"], "arguments": arguments}})
            case {"function": {"name": str()}}:
                calls.append(cast(dict[str, Any], call))
            case _:
                raise invalid("messages", f"messages: message {index}: a tool call must have a function with a name")
    return {**message, "tool_calls": calls}
