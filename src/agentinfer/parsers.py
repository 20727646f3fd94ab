"""What a model's text says besides its answer: reasoning and tool calls. Pure step functions over pieces of text.

Knows text alone, not tokens: decode with `skip_special_tokens=False` where a tokenizer calls the tags special. What
comes out does not depend on how the text was cut: `parse` of a whole text is the joined steps of any pieces of it.

Rules that are fixed here:
* Newlines next to a tag belong to the tag: they are neither reasoning nor content.
* `<think>` is a tag at the beginning of the output only, `</think>` within reasoning only. Reasoning that never ends
  is reasoning to the end of the output.
* A tool call is told once its end has come, with all of its arguments as JSON. At the end of the output one whose end
  tag is missing counts if it can be read.
* What is no readable call is content, tags included: nothing that a model said is lost. An end tag inside of a JSON
  string does not end the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn, cast

from attrs import evolve, field, frozen

from agentinfer.scan import scan

Kind = Literal["reasoning", "content"]


@frozen
class Words:
    """A piece of text."""

    kind: Kind
    text: str


@frozen
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


Said = Words | ToolCall


@frozen
class Reply:
    """What an output says in all."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


class Unterminated(ValueError):
    """A call ends within a JSON string: its end tag was none."""


@frozen
class Format:
    """How a family of models writes reasoning and calls."""

    think: tuple[str, str] | None
    """Begin and end of reasoning; None: it does not reason."""
    call: tuple[str, str]
    """Begin and end of one call."""
    around: tuple[str, ...]
    """Tags around calls, which say nothing."""
    read: Callable[[str], ToolCall | None] = field(eq=False)
    """The call in a text between the tags; None: there is none. Raises Unterminated."""


@frozen
class Parser:
    """Where the parsing of one output stands. Immutable: an older one can be gone on from, too."""

    format: Format
    mode: Literal["start", "reasoning", "content", "call"]
    default: Kind
    """What an output is that does not begin with a tag."""
    held: str = ""
    """Text that may still become a tag."""
    newlines: str = ""
    """Newlines before `held` that may still belong to a tag."""
    after_tag: bool = False
    """Nothing but newlines has come since the last tag."""
    call: str = ""
    """The call so far, from the newlines before its begin tag on."""
    body: str = ""
    """The call so far, after its begin tag."""


def new_parser(form: Format, *, thinking: bool = False) -> Parser:
    """The start of an output. *thinking*: the prompt has begun the reasoning (`opens_thinking`)."""
    return Parser(form, "content" if form.think is None else "start", "reasoning" if thinking else "content")


def opens_thinking(form: Format, prompt: str) -> bool:
    """Whether *prompt*, as the chat template rendered it, ends inside of reasoning."""
    return form.think is not None and prompt.rstrip().endswith(form.think[0])


def step(parser: Parser, piece: str) -> tuple[Parser, tuple[Said, ...]]:
    """What is certain after *piece*, and was not told before."""
    said: list[Said] = []
    more: str | None = piece
    while more is not None:
        parser, told, more = _STEPS[parser.mode](parser, more)
        said += told
    return parser, tuple(said)


def finish(parser: Parser) -> tuple[Said, ...]:
    """What is left to tell at the end of the output."""
    if parser.mode == "call":
        body = parser.body + parser.held
        call = _call_in(parser, body)
        return (call,) if isinstance(call, ToolCall) else (Words("content", parser.call + parser.held),)
    mode = parser.default if parser.mode == "start" else parser.mode
    text = parser.newlines + parser.held
    text = text.lstrip("\n") if parser.after_tag else text
    return (Words(mode, text),) if text else ()


def collect(said: Iterable[Said]) -> Reply:
    """All of *said*, joined."""
    words: dict[Kind, list[str]] = {"reasoning": [], "content": []}
    calls: list[ToolCall] = []
    for one in said:
        if isinstance(one, ToolCall):
            calls.append(one)
        else:
            words[one.kind].append(one.text)
    return Reply("".join(words["reasoning"]), "".join(words["content"]), tuple(calls))


def parse(form: Format, text: str, *, thinking: bool = False) -> Reply:
    """What a whole output says."""
    parser, said = step(new_parser(form, thinking=thinking), text)
    return collect((*said, *finish(parser)))


# --- the steps: (parser, text) -> parser, what is said, the text that is left to the next mode -----------------------

_Step = tuple[Parser, list[Said], str | None]


def _start(parser: Parser, piece: str) -> _Step:
    begin, text = cast("tuple[str, str]", parser.format.think)[0], parser.held + piece
    stripped = text.lstrip()
    if stripped.startswith(begin):
        return evolve(parser, mode="reasoning", held="", after_tag=True), [], stripped[len(begin) :]
    if begin.startswith(stripped):
        return evolve(parser, held=text), [], None
    return evolve(parser, mode=parser.default, held=""), [], text


def _reasoning(parser: Parser, piece: str) -> _Step:
    found = scan(cast("tuple[str, str]", parser.format.think)[1:], parser.held, piece)
    parser, said, _ = _words(parser, "reasoning", found.before, tag=found.mark is not None)
    if found.mark is None:
        return evolve(parser, held=found.rest), said, None
    return evolve(parser, mode="content", held=""), said, found.rest


def _content(parser: Parser, piece: str) -> _Step:
    begin = parser.format.call[0]
    found = scan((begin, *parser.format.around), parser.held, piece)
    parser, said, newlines = _words(parser, "content", found.before, tag=found.mark is not None)
    if found.mark is None:
        return evolve(parser, held=found.rest), said, None
    if found.mark != begin:
        return evolve(parser, held=""), said, found.rest
    return evolve(parser, mode="call", held="", call=newlines + begin, body=""), said, found.rest


def _call(parser: Parser, piece: str) -> _Step:
    found = scan(parser.format.call[1:], parser.held, piece)
    parser = evolve(parser, body=parser.body + found.before, call=parser.call + found.before)
    if found.mark is None:
        return evolve(parser, held=found.rest), [], None
    whole = parser.call + found.mark
    call = _call_in(parser, parser.body)
    if call == "unterminated":
        return evolve(parser, held="", body=parser.body + found.mark, call=whole), [], found.rest
    parser = evolve(parser, mode="content", held="", call="", body="")
    if isinstance(call, ToolCall):
        return parser, [call], found.rest
    return evolve(parser, after_tag=False), [Words("content", whole)], found.rest


_STEPS: Final[Mapping[str, Callable[[Parser, str], _Step]]] = MappingProxyType(
    {"start": _start, "reasoning": _reasoning, "content": _content, "call": _call}
)


def _words(parser: Parser, kind: Kind, text: str, *, tag: bool) -> tuple[Parser, list[Said], str]:
    """Tell *text*, but newlines next to a tag. Those at its end wait, unless a *tag* follows; they are given back."""
    text = parser.newlines + text
    text = text.lstrip("\n") if parser.after_tag else text
    shown = text.rstrip("\n")
    newlines = text[len(shown) :]
    after = tag or (parser.after_tag and not shown)
    said: list[Said] = [Words(kind, shown)] if shown else []
    return evolve(parser, newlines="" if tag else newlines, after_tag=after), said, newlines


def _call_in(parser: Parser, body: str) -> ToolCall | Literal["unterminated"] | None:
    try:
        return parser.format.read(body)
    except Unterminated:
        return "unterminated"


# --- the formats -----------------------------------------------------------------------------------------------------


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _json(text: str) -> Any:
    """The JSON value of *text*; None if it has none. Raises Unterminated."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unterminated from error
        return None
    except (ValueError, RecursionError):
        return None


def _tool_call(name: object, arguments: object) -> ToolCall | None:
    """The call, if *name* is one and *arguments* an object, or the JSON text of one."""
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    try:
        said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{said}".encode()
    except ValueError:  # a number that no float holds, or half of a surrogate pair
        return None
    return ToolCall(name.strip(), said)


def _hermes_call(body: str) -> ToolCall | None:
    found = _json(body.strip())
    if not isinstance(found, dict):
        return None
    said = cast("dict[str, Any]", found)
    return _tool_call(said.get("name"), said.get("arguments", {}))


_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
_FENCED: Final = re.compile(r"```json\n(.*?)\n?```\s*", re.DOTALL)


def _deepseek_call(body: str) -> ToolCall | None:
    kind, separator, rest = body.partition(_SEPARATOR)
    if not separator:
        return None
    if kind.strip() != "function":
        return _tool_call(kind, _json(rest.strip()))  # V3.1: name, arguments
    name, _, code = rest.partition("\n")
    fenced = _FENCED.fullmatch(code)
    return _tool_call(name, _json(fenced[1] if fenced is not None else code.strip().removeprefix("```json\n")))


def _deepseek(think: tuple[str, str] | None) -> Format:
    def tag(name: str) -> str:
        return f"<\uff5ctool\u2581{name}\uff5c>"

    around = (tag("calls\u2581begin"), tag("calls\u2581end"))
    return Format(think, (tag("call\u2581begin"), tag("call\u2581end")), around, _deepseek_call)


_THINK: Final = ("<think>", "</think>")
FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "hermes": Format(None, ("<tool_call>", "</tool_call>"), (), _hermes_call),
        "qwen3": Format(_THINK, ("<tool_call>", "</tool_call>"), (), _hermes_call),
        "deepseek_v3": _deepseek(None),
        "deepseek_r1": _deepseek(_THINK),
    }
)
"""By name. hermes: Qwen2.5; qwen3: with reasoning; deepseek_v3: V3, and V3.1 that does not reason; deepseek_r1: R1, and
V3.1 that does.
"""
