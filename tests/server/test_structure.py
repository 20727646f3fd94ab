"""Outputs that must have a form: response_format, and tools that must be called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentinfer.loop import open_engine
from serving import Server, running, says, small, write_talker

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_answer_has_its_schema(server: Server, path: str) -> None:
    """Whatever the model would say, its answer is JSON of the schema; in a stream, too."""
    asked = {**ASKED, "prompt": "hi"}
    del asked["prompt" if path == CHAT else "messages"]
    asked |= {"response_format": FORMAT, "structured_outputs": None}
    choice = server.post(path, asked).json()["choices"][0]
    said = choice["message"]["content"] if path == CHAT else choice["text"]
    assert json.loads(said)["a"] in (1, 22)
    assert choice["finish_reason"] == "stop"
    chunks = server.chunks(path, **asked)
    pieces = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content", "") for c in chunks]
    assert json.loads("".join(pieces))["a"] in (1, 22)


def test_vllms_own_field(server: Server) -> None:
    """structured_outputs is taken as in vLLM."""
    said = server.post(CHAT, {**ASKED, "structured_outputs": {"choice": ["yes", "no"]}}).json()
    assert said["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("choice", "names"), [("required", "fg"), ({"type": "function", "function": {"name": "g"}}, "g")], ids=str
)
def test_a_tool_must_be_called(server: Server, choice: Any, names: str) -> None:
    """A forced answer is one call whose arguments fit the tool's parameters, whole and streamed."""
    asked = {**ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 150}
    whole = server.post(CHAT, asked).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in server.chunks(CHAT, **asked)]
    (streamed,) = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    for call in (whole["message"]["tool_calls"][0], streamed):
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["a"] in (1, 22)
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None


def test_a_call_that_is_cut_off_is_content(tmp_path: Path) -> None:
    """When max_tokens ends a forced call, what there is of it is content."""
    words = '{"name": "f", "arguments": {"a": 22}}'
    with running(says(open_engine(write_talker(tmp_path), small()), words)) as server:
        asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 12}
        choice = server.post(CHAT, asked).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("{")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "nothing"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "parameters"),
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused(server: Server, more: dict[str, Any], word: str) -> None:
    """What is no form, or can not be one, is a 400 that says so."""
    answer = server.post(CHAT, {**ASKED, **more})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
