"""Reasoning and tool calls in chats, by a model that says what the test wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toys
from agentinfer.loop import open_engine
from agentinfer.parsers import FORMATS
from agentinfer.server.problems import Problem
from agentinfer.server.tools import choice_of, format_of, with_arguments
from agentinfer.text import load_text
from serving import Server, running, says, small, write_talker

CHAT = "/v1/chat/completions"
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:"
    "{{ c.function.arguments.city }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>'
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "rain?"}], "max_tokens": 200}


def whole_and_streamed(server: Server, **more: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The message of a whole answer, the one that the deltas of a stream add up to, and the two finish reasons."""
    whole = server.post(CHAT, {**ASKED, **more}).json()["choices"][0]
    added: dict[str, Any] = {}
    calls: dict[int, Any] = {}
    chunks = [chunk["choices"][0] for chunk in server.chunks(CHAT, **ASKED, **more)]
    for chunk in chunks:
        for name, value in chunk["delta"].items():
            if name == "tool_calls":
                for call in value:
                    assert call["index"] not in calls
                    calls[call["index"]] = call
            else:
                added[name] = added.get(name, "") + value
    if calls:
        added["tool_calls"] = [calls[i] for i in range(len(calls))]
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return whole["message"], added, [whole["finish_reason"], chunks[-1]["finish_reason"]]


def serving(tmp_path: Path, words: str) -> Any:
    folder = write_talker(tmp_path, TOOLS_TEMPLATE + "{# <think> #}")
    return running(says(open_engine(folder, small()), words))


def test_calls_and_reasoning(tmp_path: Path) -> None:
    """Reasoning, content and calls are told apart, in a whole answer and in a stream."""
    with serving(tmp_path, f"<think>\nwhere?\n</think>\n\nI look.\n{CALL}\n{CALL}") as server:
        for message in (found := whole_and_streamed(server, tools=[WEATHER]))[:2]:
            assert message["role"] == "assistant"
            assert message["content"] == "I look."
            assert message["reasoning"] == message["reasoning_content"] == "where?"
            assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
            functions = [call["function"] for call in message["tool_calls"]]
            assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
                ("weather", {"city": "K\u00f6ln"})
            ] * 2
            assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert found[2] == ["tool_calls", "tool_calls"]
        one = whole_and_streamed(server, tools=[WEATHER], parallel_tool_calls=False)
        assert [len(message["tool_calls"]) for message in one[:2]] == [1, 1]
        quiet = whole_and_streamed(server, tools=[WEATHER], include_reasoning=False)
        assert not any("reasoning" in message for message in quiet[:2])


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=str)
def test_without_tools_there_are_no_calls(tmp_path: Path, more: dict[str, Any]) -> None:
    """Where no tool may be called, what looks like a call is content."""
    with serving(tmp_path, f"look: {CALL}") as server:
        whole, added, reasons = whole_and_streamed(server, **more)
        assert whole["content"] == added["content"] == f"look: {CALL}"
        assert not {"tool_calls"} & {*whole, *added}
        assert reasons == ["stop", "stop"]


def test_only_calls_have_no_content(tmp_path: Path) -> None:
    """A message that is a call and nothing else has null for its content."""
    with serving(tmp_path, CALL) as server:
        whole, added, _ = whole_and_streamed(server, tools=[WEATHER])
        assert whole["content"] is None
        assert added["content"] == ""


def test_earlier_calls_reach_the_template(tmp_path: Path) -> None:
    """The arguments of earlier calls are JSON text in messages, and objects in templates."""
    folder = write_talker(tmp_path, TOOLS_TEMPLATE)
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
    ]
    with running(open_engine(folder, small())) as server:
        tokens = server.post("/tokenize", {"messages": history, "tools": [WEATHER]}).json()["tokens"]
        said = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert said.startswith('[{"type": "function"')
        assert "<tool_call>weather:Bonn</tool_call>" in said
        for arguments in ("{", "[" * 100_000):
            function["arguments"] = arguments
            answer = server.post(CHAT, {"messages": history})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        history[1]["tool_calls"] = True
        answer = server.post(CHAT, {"messages": history})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_the_format_is_that_of_the_template(tmp_path: Path) -> None:
    """auto takes the format whose tags the chat template has."""
    for source, name in (
        ("plain", None),
        ("<tool_call>", "hermes"),
        ("<tool_call><think>", "qwen3"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek_v3"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c></think>", "deepseek_r1"),
    ):
        text = load_text(toys.folder_of(tmp_path / str(name), toys.byte_level(), source))
        assert format_of(text, "auto") is (None if name is None else FORMATS[name])
        assert format_of(text, "none") is None
        assert format_of(text, "hermes") is FORMATS["hermes"]


def test_what_may_be_chosen() -> None:
    """tool_choice is none, auto, required or a function; what it names must be there."""
    assert choice_of([WEATHER], None).tools == choice_of([WEATHER], "auto").tools == (WEATHER,)
    assert choice_of([WEATHER], "none").tools == choice_of(None, "none").tools == ()
    for wanted in ("always", {"type": "function"}, {"type": "function", "function": {"name": "other"}}):
        with pytest.raises(Problem, match="tool_choice"):
            choice_of([WEATHER], wanted)
    assert with_arguments([{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]
