"""Errors name the field that was sent, where the engine has another name for it."""

from __future__ import annotations

from typing import Any

import pytest

from agentinfer.loop import SamplingParams, open_engine
from agentinfer.server.protocol import SAMPLING, SENT_AS, ChatBody, CompletionBody, GenerateBody
from agentinfer.server.site import Quotas
from serving import Server, options, running, small

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "hello " * 600}]
NO_SCHEMA = {"type": "nothing"}
NO_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": NO_SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NO_SCHEMA}}]

BAD: list[tuple[str, str, Any, dict[str, Any]]] = [
    (CHAT, "top_logprobs", 21, {"logprobs": True}),
    (CHAT, "top_logprobs", 2**40, {"logprobs": True}),
    (CHAT, "max_completion_tokens", 0, {}),
    (CHAT, "max_completion_tokens", -3, {"max_tokens": 5}),
    (CHAT, "max_completion_tokens", 5000, {}),
    (CHAT, "max_tokens", 5000, {}),
    (CHAT, "messages", LONG, {}),
    (CHAT, "response_format", NO_FORMAT, {"tools": TOOLS}),
    (CHAT, "tools", TOOLS, {"tool_choice": "required"}),
    (CHAT, "tools", TOOLS, {"tool_choice": "required", "response_format": {"type": "text"}}),
    (CHAT, "structured_outputs", {"regex": "("}, {"tools": TOOLS, "response_format": {"type": "text"}}),
    (COMPLETIONS, "response_format", NO_FORMAT, {}),
    (COMPLETIONS, "structured_outputs", {"regex": "("}, {"response_format": {"type": "text"}}),
    (COMPLETIONS, "logprobs", 2**40, {"echo": True}),
    (COMPLETIONS, "prompt_logprobs", 21, {"logprobs": 3}),
    (COMPLETIONS, "prompt", ["a"] * 40, {}),
    (COMPLETIONS, "n", 40, {"temperature": 1}),
    (COMPLETIONS, "prompt", [5, 10**20], {}),
    (COMPLETIONS, "prompt", [[5], [5, -1]], {}),
    (GENERATE, "token_ids", [100_000], {}),
    (GENERATE, "token_ids", [-(10**20)], {}),
    (GENERATE, "token_ids", [5] * 600, {}),
]
DEFAULTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "a"}, GENERATE: {"token_ids": [5]},
}  # fmt: skip
KINDS: dict[str, Any] = {CHAT: ChatBody, COMPLETIONS: CompletionBody, GENERATE: GenerateBody}
WRONG: dict[str, Any] = {"structured_outputs": {"regex": "("}, "logit_bias": {"x": 1}}


def refusal(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def shortened(body: dict[str, Any]) -> str:
    return ",".join(f"{name}={str(value)[:12]}" for name, value in body.items()) or "alone"


@pytest.mark.parametrize(
    ("path", "field", "value", "more"), BAD, ids=lambda x: shortened(x) if isinstance(x, dict) else str(x)[:24]
)
def test_the_field_that_was_sent_is_named(server: Server, path: str, field: str, value: Any, more: Any) -> None:
    """Whoever finds the value wrong, the body's reader, this server's limits or the engine."""
    error = refusal(server, path, {**DEFAULTS[path], **more, field: value})
    assert error["param"].partition(".")[0] == field
    assert f"{error['param']}: " in error["message"]


def test_every_field_with_another_name_is_tried() -> None:
    """Of each endpoint, each field that stands for one of the engine's has a bad value above."""
    tried = {(KINDS[path], field) for path, field, _, _ in BAD}
    wanted = {(kind, field) for kind, names in SENT_AS.items() for fields in names.values() for field in fields}
    assert wanted <= tried


@pytest.mark.parametrize("name", sorted(SAMPLING | {"logprobs", "prompt_logprobs"}))
def test_each_sampling_field_is_named(server: Server, name: str) -> None:
    """Of a body that has SamplingParams' own names, and of an object of them in the body."""
    value = WRONG.get(name, {"not": ["right"]})
    assert refusal(server, COMPLETIONS, {"prompt": "a", name: value})["param"].partition(".")[0] == name
    nested = refusal(server, GENERATE, {"token_ids": [5], "sampling_params": {name: value}})
    assert nested["param"] == f"sampling_params.{name}"
    assert f"{nested['param']}: " in nested["message"]


def test_limits_name_the_field_that_was_sent(server: Server) -> None:
    """A limit of this server on output tokens says max_completion_tokens to who sent that."""
    engine = open_engine(server.engine.text.folder, small())
    with running(engine, options(quotas=Quotas(max_output_tokens=9))) as one:
        error = refusal(one, CHAT, {"messages": HELLO, "max_completion_tokens": 10})
        assert error["param"] == "max_completion_tokens"
        assert error["message"].startswith("max_completion_tokens: 10 is more")
        assert SamplingParams(max_tokens=10).max_tokens == 10
