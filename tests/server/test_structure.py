"""Outputs that must have a form: response_format, and tools that must be called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentinfer.loop import open_engine
from agentinfer.server import driver
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


PATTERN = "(a?){1000}a{1000}"
"""Compiles at once; what may follow its first token is more work than a mask may take."""
BOMB = {"type": "string", "pattern": f"^{PATTERN}$"}
NO_SPACES = {str(ord(space)): -100 for space in " \t\r\n"}
"""A logit_bias: an answer in JSON comes to its point."""


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"structured_outputs": {"regex": PATTERN}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BOMB}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": BOMB}}]}, "tools"),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 9}, "structured_outputs"),
    ],
    ids=str,
)
def test_a_form_that_is_too_much_work_is_refused(server: Server, more: dict[str, Any], field: str) -> None:
    """A grammar that compiles, and whose masks do not, is the client's fault: a 400, or an event, that names it."""
    asked = {**ASKED, **more, "logit_bias": NO_SPACES, "tool_choice": "required" if "tools" in more else None}
    answer = server.post(CHAT, asked)
    assert answer.status_code == 400, answer.text
    for error in (answer.json()["error"], server.chunks(CHAT, **asked)[-1]["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        assert error["message"].startswith(f"{field}: ")
    server.quiet()


def test_a_compiler_that_breaks_is_no_fault_of_the_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiling raises, but for what is wrong with a form, is told at once as the server's; the next goes well."""

    def broken(*_given: Any) -> None:
        raise OSError(12, "no memory for a process")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "check_form", broken)
        answer = server.post(CHAT, {**ASKED, "response_format": FORMAT}, timeout=5.0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert "no memory" in answer.json()["error"]["message"]
    assert server.post(CHAT, {**ASKED, "response_format": FORMAT}).status_code == 200
