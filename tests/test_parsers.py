"""Reasoning and tool calls in a model's text, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentinfer.parsers import (
    FORMATS,
    Reply,
    Said,
    ToolCall,
    Words,
    collect,
    finish,
    new_parser,
    opens_thinking,
    parse,
    step,
)

HERMES, QWEN3, V3, R1 = (FORMATS[name] for name in ("hermes", "qwen3", "deepseek_v3", "deepseek_r1"))


def tool(words: str) -> str:
    """DeepSeek's tag of these words."""
    return f"<\uff5ctool\u2581{words.replace(' ', chr(0x2581))}\uff5c>"


def hermes(name: str, **arguments: Any) -> str:
    """A call as Qwen writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def deepseek(name: str, **arguments: Any) -> str:
    """A call as DeepSeek V3 and R1 write it."""
    said = json.dumps(arguments, ensure_ascii=False)
    return f"{tool('call begin')}function{tool('sep')}{name}\n```json\n{said}\n```{tool('call end')}"


def call(name: str, **arguments: Any) -> ToolCall:
    """The call that is meant."""
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


INFINITE = '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'
WEATHER = call("weather", city="K\u00f6ln", days=2)
CASES: list[tuple[str, bool, str, Reply]] = [
    ("hermes", False, "Hello\n", Reply("", "Hello\n", ())),
    ("hermes", False, hermes("weather", city="K\u00f6ln", days=2), Reply("", "", (WEATHER,))),
    (
        "hermes",
        False,
        "Let me see.\n" + hermes("weather", city="K\u00f6ln", days=2) + "\n" + hermes("now"),
        Reply("", "Let me see.", (WEATHER, call("now"))),
    ),
    ("hermes", False, hermes("f", x="</tool_call>") + "\nend", Reply("", "end", (call("f", x="</tool_call>"),))),
    ("hermes", False, hermes("f", x=1).removesuffix("\n</tool_call>"), Reply("", "", (call("f", x=1),))),
    (
        "hermes",
        False,
        "a\n<tool_call>\nno call\n</tool_call>\nb",
        Reply("", "a\n<tool_call>\nno call\n</tool_call>\nb", ()),
    ),
    ("hermes", False, '<tool_call>{"name": "f", "argu', Reply("", '<tool_call>{"name": "f", "argu', ())),
    ("hermes", False, '<tool_call>{"name": "f"}</tool_call>', Reply("", "", (call("f"),))),
    (
        "hermes",
        False,
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
        Reply("", "", (call("f", x=1),)),
    ),
    ("hermes", False, INFINITE, Reply("", INFINITE, ())),
    ("hermes", False, "<think>x</think>", Reply("", "<think>x</think>", ())),
    (
        "qwen3",
        False,
        "<think>\nHm, <think>?\n\nYes.\n</think>\n\nIt is 4.",
        Reply("Hm, <think>?\n\nYes.", "It is 4.", ()),
    ),
    ("qwen3", False, "It is 4, </think> or <think> not.", Reply("", "It is 4, </think> or <think> not.", ())),
    ("qwen3", False, "<think>\n\n</think>\n\n" + hermes("now"), Reply("", "", (call("now"),))),
    ("qwen3", False, "<think>\nfor ever", Reply("for ever", "", ())),
    ("qwen3", True, "so <tool_call>\n</think>\n\n" + hermes("now"), Reply("so <tool_call>", "", (call("now"),))),
    ("qwen3", False, " <thi", Reply("", " <thi", ())),
    ("deepseek_r1", True, "Well.\n</think>\n\nYes", Reply("Well.", "Yes", ())),
    ("deepseek_r1", True, "<think>\nWell.\n</think>\n\nYes", Reply("Well.", "Yes", ())),
    (
        "deepseek_r1",
        True,
        "Hm\n</think>\n\nSo\n"
        + tool("calls begin")
        + deepseek("weather", city="K\u00f6ln", days=2)
        + "\n"
        + deepseek("now")
        + tool("calls end"),
        Reply("Hm", "So", (WEATHER, call("now"))),
    ),
    (
        "deepseek_v3",
        False,
        tool("calls begin") + deepseek("f", x="```\n") + tool("calls end"),
        Reply("", "", (call("f", x="```\n"),)),
    ),
    (
        "deepseek_v3",
        False,
        tool("calls begin")
        + tool("call begin")
        + "weather"
        + tool("sep")
        + '{"city": "K\u00f6ln", "days": 2}'
        + tool("call end")
        + tool("calls end"),
        Reply("", "", (WEATHER,)),
    ),
    (
        "deepseek_v3",
        False,
        tool("calls begin") + deepseek("f", x=tool("call end")),
        Reply("", "", (call("f", x=tool("call end")),)),
    ),
    (
        "deepseek_v3",
        False,
        tool("call begin") + "f" + tool("call end"),
        Reply("", tool("call begin") + "f" + tool("call end"), ()),
    ),
]


def joined(said: list[Said]) -> list[Said]:
    """Neighbouring words of one kind as one."""
    found: list[Said] = []
    for one in said:
        last = found[-1] if found else None
        if isinstance(one, Words) and isinstance(last, Words) and last.kind == one.kind:
            found[-1] = Words(one.kind, last.text + one.text)
        else:
            found.append(one)
    return found


def streamed(name: str, text: str, cuts: list[int], *, thinking: bool) -> list[Said]:
    """What the pieces of *text* say, one after the other."""
    parser, said, at = new_parser(FORMATS[name], thinking=thinking), list[Said](), 0
    for cut in [*sorted({c % (len(text) + 1) for c in cuts}), len(text)]:
        parser, told = step(parser, text[at:cut])
        assert all(one.text for one in told if isinstance(one, Words))
        said += told
        at = cut
    return [*said, *finish(parser)]


@pytest.mark.parametrize(("name", "thinking", "text", "want"), CASES)
def test_known_outputs(name: str, text: str, want: Reply, *, thinking: bool) -> None:
    """Each is parsed as it is meant, whole and a character at a time."""
    assert parse(FORMATS[name], text, thinking=thinking) == want
    assert collect(streamed(name, text, list(range(len(text))), thinking=thinking)) == want


PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    "\n\n",
    "a",
    " ",
    "<",
    "<to",
    '{"name": "f"',
    ', "arguments": {}}',
    '{"name": "f", "arguments": {"x": "</tool_call>',
    '"}}',
    hermes("g", y=[1, None]),
    deepseek("h", z="\u4e16"),
    tool("calls begin"),
    tool("calls end"),
    tool("call begin"),
    tool("call end"),
    tool("sep"),
    "function",
    "```json\n{}\n```",
]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
@example(name="hermes", thinking=False, text="a\n<tool_call>\n\n</tool_call>", cuts=[2])
def test_cuts_do_not_matter(name: str, thinking: bool, text: str, cuts: list[int]) -> None:
    """Pieces say what the whole says, in the same order; words of a whole hold no tag that was understood."""
    whole = joined(streamed(name, text, [], thinking=thinking))
    assert joined(streamed(name, text, cuts, thinking=thinking)) == whole
    for one in whole:
        if isinstance(one, ToolCall):
            assert isinstance(json.loads(one.arguments), dict)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(["a", "<", "t", "\n", "\uff5c", "</"]), max_size=20).map("".join),
)
def test_text_without_tags_is_content_as_it_is(name: str, text: str) -> None:
    """Nothing is lost or trimmed where there is no tag, the newlines at both ends included."""
    assert parse(FORMATS[name], text) == Reply("", text, ())


def test_words_come_as_early_as_they_are_certain() -> None:
    """Only what may be a tag, or newlines before one, is held back."""
    parser, got = new_parser(QWEN3), []
    for piece in ("<think>", "\n", "a", "\n", "b</", "think", ">", "\n\n", "c", "<too", "k", "\n"):
        parser, said = step(parser, piece)
        got.append(said)
    assert got == [
        (), (), (Words("reasoning", "a"),), (), (Words("reasoning", "\nb"),), (), (), (), (Words("content", "c"),), (),
        (Words("content", "<took"),), (),
    ]  # fmt: skip
    assert finish(parser) == (Words("content", "\n"),)


def test_a_prompt_that_opens_reasoning_is_seen() -> None:
    """R1's and Qwen3-Thinking's templates end with the tag; Qwen3's, and its empty block, do not."""
    assert opens_thinking(R1, "<|Assistant|><think>\n")
    assert not opens_thinking(QWEN3, "<|im_start|>assistant\n")
    assert not opens_thinking(QWEN3, "<think>\n\n</think>\n\n")
    assert not opens_thinking(HERMES, "<think>\n")
    assert not opens_thinking(V3, "<think>")


def test_halves_of_surrogate_pairs_are_no_arguments() -> None:
    """What can not be sent as UTF-8 is content."""
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'
    assert parse(HERMES, text) == Reply("", text, ())
