"""`response_format`, and what a tool call must look like, as structured output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agentinfer.server.problems import invalid
from agentinfer.server.protocol import SAMPLING


def structure_of(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of SamplingParams that make an output have *response_format*. Raises Problem."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return constrained("response_format", {"json_object": True})
        case {"type": "json_schema", "json_schema": {"schema": schema}} if isinstance(schema, dict):
            return constrained("response_format", {"json": schema})
        case {"type": "json_schema"}:
            raise invalid("response_format", "response_format: json_schema.schema must be an object")
        case {"type": "structural_tag"}:
            raise invalid("response_format", "response_format: structural_tag is not supported")
        case _:
            raise invalid("response_format", "response_format: type must be text, json_object or json_schema")


def constrained(name: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """*form* as a field of SamplingParams, asked for by the field *name*. Raises Problem where that can not be."""
    if "structured_outputs" not in SAMPLING:
        raise invalid(name, f"{name}: structured output is not supported")
    return {"structured_outputs": dict(form)}


def tools_schema(tools: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """A JSON schema of one call of any of *tools*, or of the one called *name*. Raises Problem."""
    functions = [cast(dict[str, Any], tool["function"]) for tool in tools]
    wanted = [one for one in functions if name is None or one["name"] == name]
    if not wanted:
        raise invalid("tool_choice", f"tool_choice: no tool is called {name!r}")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "arguments": one.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in wanted
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
