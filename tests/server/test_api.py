"""OpenAI's API over a tiny model: shapes, streams, choices, usage, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toys
from agentinfer.loop import generate, open_engine
from agentinfer.state.request import SamplingParams
from agentinfer.text import chat
from serving import NAME, Server, running, small, write_talker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def own(folder: Path, prompts: list[Any], **params: Any) -> list[Any]:
    """What the library says to *prompts*."""
    return generate(open_engine(folder, small()), prompts, SamplingParams(**{**GREEDY, **params}))


# --- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_is_the_librarys(server: Server, folder: Path) -> None:
    """Text, reason and counts of a completion are those of generate."""
    (want,) = own(folder, ["hello"], max_tokens=7)
    said = server.complete(model=NAME, prompt="hello", max_tokens=7, **GREEDY)
    (choice,) = said["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, want.text, "length")
    assert said["object"] == "text_completion"
    assert said["id"].startswith("cmpl-")
    assert said["model"] == NAME
    assert said["usage"] == {
        "prompt_tokens": len(want.prompt_ids),
        "completion_tokens": 7,
        "total_tokens": len(want.prompt_ids) + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_max_tokens_is_16_unless_asked(server: Server) -> None:
    """As in the OpenAI API; and no more than there is room for."""
    assert server.complete(prompt="hello", **GREEDY)["usage"]["completion_tokens"] == 16
    assert server.complete(prompt=[5] * 505, **GREEDY)["usage"]["completion_tokens"] == 7


def test_prompts_and_choices_in_order(server: Server, folder: Path) -> None:
    """Choices are listed by prompt, then by n, whichever ends first; usage counts each prompt once."""
    prompts = ["hello hello hello hello", "a", "b b b"]
    want = own(folder, prompts, max_tokens=5)
    said = server.complete(prompt=prompts, max_tokens=5, echo=True, **GREEDY)
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in said["choices"]] == [
        f"{prompt}{one.text}" for prompt, one in zip(prompts, want, strict=True)
    ]
    assert said["usage"]["prompt_tokens"] == sum(len(one.prompt_ids) for one in want)
    sampled = server.complete(prompt=prompts, max_tokens=5, n=2, seed=3, echo=True, ignore_eos=True)
    assert [choice["index"] for choice in sampled["choices"]] == list(range(6))
    assert all(choice["text"].startswith(prompts[i // 2]) for i, choice in enumerate(sampled["choices"]))
    assert sampled["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    assert sampled["usage"]["completion_tokens"] == 30
    again = server.complete(prompt=prompts, max_tokens=5, n=2, seed=3, echo=True, ignore_eos=True)
    assert again["choices"] == sampled["choices"]


def test_choices_are_the_librarys(server: Server, folder: Path) -> None:
    """The n choices of a prompt are the n outputs of generate; the prompt is computed once."""
    params = SamplingParams(max_tokens=6, n=3, seed=9, ignore_eos=True)
    (want,) = generate(open_engine(folder, small()), [[5] * 20], params)
    said = server.complete(prompt=[5] * 20, max_tokens=6, n=3, seed=9, ignore_eos=True, cache_salt="choices")
    assert [choice["text"] for choice in said["choices"]] == [one.text for one in want.outputs]
    assert said["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 18,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompts_may_be_token_ids(server: Server, folder: Path) -> None:
    """A list of ids is one prompt, a list of lists several."""
    want = [one.text for one in own(folder, [[5, 6, 7], [9, 9]], max_tokens=4)]
    one = server.complete(prompt=[5, 6, 7], max_tokens=4, **GREEDY)
    two = server.complete(prompt=[[5, 6, 7], [9, 9]], max_tokens=4, **GREEDY)
    assert [choice["text"] for choice in one["choices"]] == want[:1]
    assert [choice["text"] for choice in two["choices"]] == want


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_whole_in_pieces(server: Server, n: int, max_tokens: int, options: Any) -> None:
    """Joined, a stream's chunks are the whole answer; each choice ends once; usage comes last if asked for."""
    asked: dict[str, Any] = {"prompt": ["hello", "a"], "max_tokens": max_tokens, "n": n, "seed": 5, "ignore_eos": True}
    whole = server.complete(**asked)
    chunks = server.chunks(COMPLETIONS, stream_options=options, **asked)
    if options == {"include_usage": True}:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for choice in whole["choices"]:
        own_chunks = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own_chunks) == choice["text"]
        assert [one["finish_reason"] for one in own_chunks if one["finish_reason"]] == [choice["finish_reason"]]
        assert own_chunks[-1]["finish_reason"] is not None


def test_continuous_usage(server: Server) -> None:
    """With continuous_usage_stats each chunk says how many tokens there are so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks(COMPLETIONS, prompt="a", max_tokens=6, stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_cached_tokens(server: Server) -> None:
    """Usage says how much of a prompt was found in the cache."""
    prompt = [7, 3] * 20
    server.complete(prompt=prompt, max_tokens=1)
    assert server.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    other = server.complete(prompt=prompt, max_tokens=1, cache_salt="mine")
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stop_strings(server: Server, folder: Path) -> None:
    """An answer ends before a stop string, and says which it was; so does a stream."""
    (want,) = own(folder, ["hello"], max_tokens=8)
    stop = want.text[3:5]
    at = want.text.index(stop)
    choice = server.complete(prompt="hello", max_tokens=8, stop=[stop, "never"], **GREEDY)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want.text[:at], "stop", stop)
    chunks = server.chunks(COMPLETIONS, prompt="hello", max_tokens=8, stop=stop, **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want.text[:at]


def test_bad_words_are_texts(server: Server, folder: Path) -> None:
    """Spelled by the engine's tokenizer, as in the library."""
    (plain,) = own(folder, ["hello"], max_tokens=6)
    words = [plain.text[:1]]
    (want,) = own(folder, ["hello"], max_tokens=6, bad_words=words)
    said = server.complete(model=NAME, prompt="hello", max_tokens=6, bad_words=words, **GREEDY)
    assert said["choices"][0]["text"] == want.text != plain.text


def test_echo_of_one_token_has_its_entry(server: Server) -> None:
    """The first of a text has no log-probability, and its place all the same."""
    said = server.complete(model=NAME, prompt=[7], max_tokens=2, echo=True, logprobs=1, **GREEDY)
    judged = said["choices"][0]["logprobs"]
    assert [len(judged[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [3, 3, 3]
    assert judged["token_logprobs"][0] is None
    assert judged["text_offset"][0] == 0


def test_a_stop_token_is_named(server: Server, folder: Path) -> None:
    """stop_reason is the id of a stop token that was asked for."""
    (want,) = own(folder, ["hello"], max_tokens=3)
    token = want.output_ids[1]
    choice = server.complete(prompt="hello", max_tokens=3, stop_token_ids=[token], **GREEDY)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_token_ids_are_returned(server: Server, folder: Path) -> None:
    """return_token_ids shows the tokens of prompt and answer."""
    (want,) = own(folder, ["hello"], max_tokens=5)
    choice = server.complete(prompt="hello", max_tokens=5, return_token_ids=True, **GREEDY)["choices"][0]
    assert tuple(choice["token_ids"]) == want.output_ids
    assert tuple(choice["prompt_token_ids"]) == want.prompt_ids
    chunks = server.chunks(COMPLETIONS, prompt="hello", max_tokens=5, return_token_ids=True, **GREEDY)
    assert tuple(i for chunk in chunks for i in chunk["choices"][0]["token_ids"]) == want.output_ids


def test_the_request_names_its_answer(server: Server) -> None:
    """The id of an answer is the request's own where it has one; several may have the same."""
    assert server.complete(prompt="a", max_tokens=1, request_id="mine")["id"] == "cmpl-mine"
    answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "other"})
    assert answer.json()["id"] == "cmpl-other"


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_librarys(server: Server, folder: Path) -> None:
    """The prompt is what the chat template makes of the messages, the answer that of generate."""
    engine = open_engine(folder, small())
    assert engine.text is not None
    prompt = chat(engine.text, HELLO)
    (want,) = own(folder, [prompt], max_tokens=7)
    said = server.post(CHAT, {"messages": HELLO, "max_completion_tokens": 7, **GREEDY}).json()
    (choice,) = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert said["object"] == "chat.completion"
    assert said["usage"]["prompt_tokens"] == len(prompt)
    chunks = [chunk["choices"][0] for chunk in server.chunks(CHAT, messages=HELLO, max_tokens=7, **GREEDY)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == want.text
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


def test_content_may_be_parts(server: Server) -> None:
    """Text parts are joined; other parts are refused."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert server.post(CHAT, {"messages": parts, "max_tokens": 1}).status_code == 200
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    answer = server.post(CHAT, {"messages": image, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    """chat_template_kwargs are variables of the template, and a BOS that it writes is the only one."""
    toys.folder_of(tmp_path, toys.byte_level(), toys.WITH_BOS, bos_token="<|im_start|>")  # noqa: S106
    folder = write_talker(tmp_path, None)
    toys.folder_of(folder, toys.byte_level(), toys.WITH_BOS, bos_token="<|im_start|>")  # noqa: S106
    engine = open_engine(folder, small())
    assert engine.text is not None
    with running(engine) as server:
        plain = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
        quick = server.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}).json()
        assert plain == list(chat(engine.text, HELLO))
        assert quick["tokens"] == list(chat(engine.text, HELLO, enable_thinking=False)) != plain
        bos = engine.text.tokenizer.token_to_id("<|im_start|>")
        assert (plain[0], plain.count(bos)) == (bos, 1)
        asked = {"messages": HELLO, "chat_template_kwargs": {"messages": []}}
        assert server.post(CHAT, asked).json()["error"]["param"] == "chat_template_kwargs"


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokenize_and_back(server: Server) -> None:
    """Tokens of a text, and the text of tokens."""
    said = server.post("/tokenize", {"prompt": "hello 1", "return_token_strs": True}).json()
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert said["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": said["tokens"]}).json() == {"prompt": "hello 1"}


def test_generate_speaks_tokens(server: Server, folder: Path) -> None:
    """Token ids in, token ids out; whole and in pieces."""
    (want,) = own(folder, [[5, 6, 7]], max_tokens=6)
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6, **GREEDY}}
    said = server.post("/generate", asked).json()
    assert tuple(said["choices"][0]["token_ids"]) == want.output_ids
    chunks = server.chunks("/generate", **asked)
    assert tuple(i for chunk in chunks for i in chunk["choices"][0]["token_ids"]) == want.output_ids
    wrong = server.post("/generate", {"token_ids": [5], "sampling_params": {"temprature": 1}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "sampling_params")


# --- errors ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, [], 400, None),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [], [3]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, -2]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, 100000]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 600}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 1e-40}, 400, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    (
        CHAT,
        {
            "messages": HELLO,
            "structured_outputs": {"choice": ["yes"]},
            "response_format": {"type": "json_object"},
        },
        400,
        "structured_outputs",
    ),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        400,
        "response_format",
    ),
    (COMPLETIONS, {"prompt": "a", "n": 129, "temperature": 1}, 400, "n"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, 400, "modalities"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, 400, "chat_template"),
    (CHAT, {"messages": HELLO, "echo": True}, 400, "echo"),
    (CHAT, {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprob_token_ids": [1]}, 400, "logprob_token_ids"),
    (COMPLETIONS, {"prompt": "a", "guided_whitespace_pattern": " "}, 400, "guided_whitespace_pattern"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/generate", {"token_ids": []}, 400, "token_ids"),
    ("/generate", {"token_ids": [5], "max_tokens": 3}, 400, "max_tokens"),
    ("/generate", {"token_ids": [5], "logprobs": 1}, 400, "logprobs"),
    ("/v1/nothing", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=str)
def test_what_is_wrong_is_said(server: Server, path: str, body: Any, status: int, param: str | None) -> None:
    """A wrong request gets one error object that names the field, with the right status."""
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]


def test_a_batch_names_its_bad_item(server: Server) -> None:
    """One bad prompt refuses the batch, and is named."""
    for prompts in (["a", ""], ["a", [1, 100000]]):
        answer = server.post(COMPLETIONS, {"prompt": prompts})
        assert answer.status_code == 400
        assert "item 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000], ids=range(6)
)
def test_what_is_no_json(server: Server, body: bytes) -> None:
    """A body that is no JSON is a 400."""
    with server.client() as client:
        answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_other_content_types_are_refused(server: Server) -> None:
    """A form is a 415: no page of another site can make a browser send JSON here."""
    with server.client() as client:
        answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_unknown_fields_are_ignored_aloud(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Fields without effect are accepted, listed in a header, and logged once."""
    asked = {"prompt": "a", "max_tokens": 1, "foo": 1, "user": "me", "store": True, "tempreture": 2, "suffix": None}
    for _ in range(2):
        answer = server.post(COMPLETIONS, asked)
        assert answer.status_code == 200
        assert answer.headers["x-ignored-fields"] == "foo, user, store, tempreture"
    assert [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()] == [
        "fields that are ignored in requests: foo, user, store, tempreture"
    ]
    odd = {"prompt": "a", "max_tokens": 1, "": 1, "\r\nX: y": 2, "\u00e9 ": 3, "x" * 100_000: 4}
    header = server.post(COMPLETIONS, odd).headers["x-ignored-fields"]
    assert header == f"%0D%0AX%3A%20y, %C3%A9%20, {'x' * 64}"
    assert "x-ignored-fields" not in server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "": 1}).headers
    neutral = {"prompt": "a", "max_tokens": 1, "best_of": 1, "suffix": "", "use_beam_search": False}
    assert "x-ignored-fields" not in server.post(COMPLETIONS, neutral).headers
    neutral = {"messages": HELLO, "max_tokens": 1, "echo": False, "add_special_tokens": False}
    assert "x-ignored-fields" not in server.post(CHAT, neutral).headers


# --- the small ones --------------------------------------------------------------------------------------------------


def test_the_small_endpoints(server: Server) -> None:
    """Health, models, version, load and metrics answer."""
    assert server.get("/health").status_code == 200
    listed = server.get("/v1/models").json()
    assert [(one["id"], one["object"], one["max_model_len"]) for one in listed["data"]] == [(NAME, "model", 512)]
    assert server.get(f"/v1/models/{NAME}").json() == listed["data"][0]
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert server.get("/version").json()["version"]
    assert server.get("/load").json()["num_blocks"] == 64


def test_metrics_count(server: Server) -> None:
    """Metrics have vLLM's names, and count what happened."""

    def value(text: str, name: str, labels: str = "") -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and labels in line]
        assert len(lines) <= 1, (name, lines)
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0  # of a label that nothing had yet

    before = server.get("/metrics").text
    server.complete(prompt=[4, 4, 4], max_tokens=5, **GREEDY)
    after = server.get("/metrics").text
    for name, labels, more in (
        ("vllm:prompt_tokens_total", "", 3),
        ("vllm:generation_tokens_total", "", 5),
        ("vllm:request_success_total", 'finished_reason="length"', 1),
        ("vllm:time_to_first_token_seconds_count", "", 1),
        ("vllm:inter_token_latency_seconds_count", "", 4),
        ("vllm:request_queue_time_seconds_count", "", 1),
        ("vllm:e2e_request_latency_seconds_count", "", 1),
        ("vllm:request_generation_tokens_sum", "", 5),
        ("vllm:request_prefill_time_seconds_count", "", 1),
        ("vllm:request_decode_time_seconds_count", "", 1),
        ("vllm:request_inference_time_seconds_count", "", 1),
        ("vllm:request_time_per_output_token_seconds_count", "", 1),
    ):
        assert value(after, name, labels) - value(before, name, labels) == more, name
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in after
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in after
