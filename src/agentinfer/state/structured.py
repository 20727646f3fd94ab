"""What form an output must have. Never changes once made. What it means for tokens is said elsewhere (grammar.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from attrs import Attribute, field, fields_dict, frozen

from agentinfer.errors import InvalidRequest
from agentinfer.state.ids import tupled

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
FIELD: Final = "structured_outputs"
"""The name of all this in SamplingParams."""


def _refuse(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name}", message)


def _text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise _refuse(attribute.name, f"must be a text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _refuse(attribute.name, f"is no valid Unicode: {value[error.start]!r}") from error


def _flag(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute.name, f"must be true or false, not {value!r}")


def _choices(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if type(value) is not tuple or not value:
        raise _refuse(attribute.name, f"must be a list of at least one text, not {value!r}")
    for words in cast("tuple[Any, ...]", value):
        if not isinstance(words, str) or not words:
            raise _refuse(attribute.name, f"must hold texts of at least one character, not {words!r}")
        _text(None, attribute, words)


def _schema(value: Any) -> Any:
    """A schema given as a mapping, as JSON text."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refuse("json", f"is no JSON: {error}") from error


def _listed(value: Any) -> Any:
    return value if isinstance(value, str) else tupled(value)


@frozen
class StructuredOutputsParams:
    """The form that an output must have: one of `json`, `json_object`, `regex`, `choice` and `grammar`, as in vLLM.

    Raises InvalidRequest naming the field.
    """

    json: str | None = field(default=None, converter=_schema, validator=_text)
    """A JSON schema, as JSON text; a mapping is turned into that. The order of its properties is that of the output."""
    regex: str | None = field(default=None, validator=_text)
    """A regular expression (Rust's syntax, no look-around) that the whole output matches."""
    choice: tuple[str, ...] | None = field(default=None, converter=_listed, validator=_choices)
    """The output is one of these texts."""
    grammar: str | None = field(default=None, validator=_text)
    """A Lark grammar, whose rule `start` is the output."""
    json_object: bool = field(default=False, validator=_flag)
    """The output is any JSON object."""
    disable_any_whitespace: bool = field(default=False, validator=_flag)
    """Of `json` and `json_object`: no white space outside of strings; else any amount may be anywhere."""
    whitespace_pattern: str | None = field(default=None, validator=_text)
    """Of `json` and `json_object`: a regular expression of the white space that may be there."""

    def __attrs_post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            raise InvalidRequest(FIELD, f"must have exactly one of {', '.join(_KINDS)}, not {said}")
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and given[0] not in ("json", "json_object"):
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise _refuse(name, f"is for json and json_object, not for {given[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _refuse("whitespace_pattern", "can not be together with disable_any_whitespace")


def structured(value: Any) -> StructuredOutputsParams | None:
    """*value*, or the StructuredOutputsParams whose fields a mapping has, as in traces. Raises InvalidRequest."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequest(FIELD, f"must be a StructuredOutputsParams, not {value!r}")
    given = cast("Mapping[Any, Any]", value)
    known = fields_dict(StructuredOutputsParams)
    for name in given:
        if name not in known:
            raise InvalidRequest(FIELD, f"has no field {name!r}: its fields are {', '.join(known)}")
    return StructuredOutputsParams(**given)
