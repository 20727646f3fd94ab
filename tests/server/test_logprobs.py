"""Log-probabilities over HTTP: aligned with tokens and characters, equal to those of `score`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentinfer.loop import open_engine
from agentinfer.scoring import score
from agentinfer.text import decode, encode
from serving import Server, small

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "hello \u4e16 12"
"""A token of several characters, and characters of several tokens."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def scored(folder: Path, ids: list[int]) -> Any:
    (found,) = score(open_engine(folder, small()), [ids], top=2)
    return found


def test_echo_scores_a_prompt(server: Server, folder: Path) -> None:
    """With echo and logprobs every token of prompt and answer has its log-probability, but for the first."""
    said = server.complete(
        prompt=TEXT, max_tokens=4, echo=True, logprobs=2, return_token_ids=True, **GREEDY
    )["choices"][0]  # fmt: skip
    ids = [*said["prompt_token_ids"], *said["token_ids"]]
    want, found = scored(folder, ids), said["logprobs"]
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, len(ids))
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(list(want.logprobs), abs=1e-4)
    assert all(1 <= len(top) <= 3 for top in found["top_logprobs"][1:])
    assert said["text"].startswith(TEXT)


def test_offsets_are_characters(server: Server, folder: Path) -> None:
    """text_offset is where each token's own text begins, in the text with the echo; streamed, it goes on."""
    text = open_engine(folder, small()).text
    assert text is not None
    asked = {"prompt": TEXT, "max_tokens": 6, "echo": True, "logprobs": 0, **GREEDY}
    said = server.complete(**asked)["choices"][0]
    ids = encode(text, TEXT)
    offsets = said["logprobs"]["text_offset"]
    whole = [len(decode(text, ids[:n])) - decode(text, ids[:n]).count("\ufffd") for n in range(len(ids))]
    assert offsets[: len(ids)] == whole
    assert offsets == sorted(offsets)
    assert offsets[len(ids)] == len(TEXT)
    chunks = [chunk["choices"][0] for chunk in server.chunks(COMPLETIONS, **asked)]
    joined: dict[str, list[Any]] = {name: [] for name in said["logprobs"]}
    for chunk in chunks:
        for name, values in (chunk["logprobs"] or {}).items():
            joined[name] += values
    assert joined["text_offset"] == offsets
    assert joined["tokens"] == said["logprobs"]["tokens"]
    assert joined["token_logprobs"][1:] == pytest.approx(said["logprobs"]["token_logprobs"][1:], abs=1e-4)
    assert "".join(chunk["text"] for chunk in chunks) == said["text"]


def test_echo_without_an_answer(server: Server, folder: Path) -> None:
    """max_tokens 0 with echo scores the prompt and generates nothing, for text and ids, for several at once."""
    prompts = [[5, 6, 7, 8], [9, 9, 9]]
    said = server.complete(prompt=prompts, max_tokens=0, echo=True, logprobs=1)
    assert said["usage"]["completion_tokens"] == 0
    assert said["usage"]["total_tokens"] == 7
    for choice, ids in zip(said["choices"], prompts, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        want = list(scored(folder, ids).logprobs)
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
        assert choice["finish_reason"] == "length"
    chunks = server.chunks(COMPLETIONS, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    plain = server.complete(prompt=TEXT, max_tokens=0, echo=True)
    assert plain["choices"][0]["text"] == TEXT


def test_each_choice_has_its_own(server: Server) -> None:
    """With n = 2 each choice has the prompt's log-probabilities and its own."""
    said = server.complete(prompt=TEXT, max_tokens=3, n=2, seed=1, echo=True, logprobs=1, ignore_eos=True)
    first, second = (choice["logprobs"] for choice in said["choices"])
    size = len(first["tokens"]) - 3
    assert len(second["tokens"]) == size + 3
    assert first["token_logprobs"][1:size] == pytest.approx(second["token_logprobs"][1:size], abs=1e-4)
    assert first["tokens"][size:] != second["tokens"][size:]


def test_prompt_logprobs(server: Server) -> None:
    """vLLM's prompt_logprobs: by token id, the prompt's own token and the likeliest ones."""
    choice = server.complete(prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert ["6" in rest[0], "7" in rest[1]] == [True, True]
    assert all({one["rank"] for one in place.values()} >= {1, 2} for place in rest)
    answer = server.post(COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_chats_tokens(server: Server) -> None:
    """Each token of a chat's answer: its text, its bytes, its log-probability, and the likeliest ones."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    content = server.post(CHAT, {**asked, **GREEDY}).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    for one in content:
        assert len(one["top_logprobs"]) == 3
        assert one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0  # greedy takes the likeliest
        assert bytes(one["bytes"]).decode() == one["token"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in server.chunks(CHAT, **asked, **GREEDY)]
    streamed = [one for judged in chunks if judged for one in judged["content"]]
    assert [one["token"] for one in streamed] == [one["token"] for one in content]
    bare = server.post(CHAT, {**asked, "top_logprobs": None, **GREEDY}).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in bare] == [[]] * 4


def test_generates_tokens_have_theirs(server: Server) -> None:
    """/generate says them as chats do, and the prompt's by id."""
    params = {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, **GREEDY}
    said = server.post("/generate", {"token_ids": [5, 6, 7], "sampling_params": params}).json()
    assert len(said["choices"][0]["logprobs"]["content"]) == 3
    assert [len(one or ()) for one in said["prompt_logprobs"]] == [0, 1, 1]
