"""The API where the model is shared by two ranks: rank 0 serves, the other one follows."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from agentinfer.loop import generate, open_engine
from agentinfer.scoring import score
from agentinfer.state.request import SamplingParams
from agentinfer.text import chat
from serve_faults import Server, served, settle
from serving import small

pytestmark = pytest.mark.slow
HELLO: Any = [{"role": "user", "content": "hello"}]
IGNORE: Any = {"ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 450, "stream": True, "extra_body": IGNORE}


@pytest.fixture(scope="module")
def two(folder: Path) -> Generator[Server]:
    """A server of two processes, which all of these tests ask."""
    with served(str(folder), ["--tp", "2"]) as server:
        yield server
        settle(server)


@pytest.fixture
def client(two: Server) -> Generator[openai.OpenAI]:
    with client_of(two) as one:
        yield one


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def name_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def own(folder: Path, prompt: Any, **params: Any) -> Any:
    """What the library says to *prompt*, on one rank."""
    (found,) = generate(open_engine(folder, small()), [prompt], SamplingParams(**{"ignore_eos": True, **params}))
    return found


def test_completions(client: openai.OpenAI, folder: Path) -> None:
    """Whole and streamed, the text is that of one rank; usage counts."""
    want = own(folder, "hello", temperature=0, max_tokens=8)
    asked: Any = {"model": name_of(client), "prompt": "hello", "max_tokens": 8, "temperature": 0, "extra_body": IGNORE}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == want.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert "".join(piece.choices[0].text for piece in client.completions.create(**asked, stream=True)) == want.text


def test_chats_stream(client: openai.OpenAI, folder: Path) -> None:
    """The deltas of a chat add up to the answer of one rank, and the last chunk has the usage."""
    text = open_engine(folder, small()).text
    assert text is not None
    want = own(folder, chat(text, HELLO), temperature=0, max_tokens=8)
    chunks = list(
        client.chat.completions.create(
            model=name_of(client), messages=HELLO, max_completion_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body=IGNORE,
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == want.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_choices(client: openai.OpenAI, folder: Path) -> None:
    """The n choices of a prompt are the n outputs of one rank."""
    want = own(folder, [5] * 20, n=3, seed=9, max_tokens=6)
    said = client.completions.create(
        model=name_of(client), prompt=[5] * 20, max_tokens=6, n=3, seed=9, extra_body=IGNORE
    )
    assert [choice.text for choice in said.choices] == [one.text for one in want.outputs]


def test_echo_and_logprobs(client: openai.OpenAI, folder: Path) -> None:
    """Prompt and answer have the log-probabilities that `score` finds on one rank."""
    said = client.completions.create(
        model=name_of(client), prompt=[5, 6, 7, 8], max_tokens=4, echo=True, logprobs=2, temperature=0,
        extra_body={**IGNORE, "return_token_ids": True},
    ).choices[0]  # fmt: skip
    ids = [*(said.model_extra or {})["prompt_token_ids"], *(said.model_extra or {})["token_ids"]]
    (want,) = score(open_engine(folder, small()), [ids], top=2)
    assert said.logprobs is not None
    found = said.logprobs.token_logprobs or []
    assert found[0] is None
    assert found[1:] == pytest.approx(list(want.logprobs), abs=1e-4)


def test_stop(client: openai.OpenAI, folder: Path) -> None:
    """A stop string ends an answer before itself."""
    want = own(folder, "hello", temperature=0, max_tokens=8).text
    stop = want[3:5]
    said = client.completions.create(
        model=name_of(client), prompt="hello", max_tokens=8, temperature=0, stop=stop, extra_body=IGNORE
    ).choices[0]
    assert (said.text, said.finish_reason) == (want[: want.index(stop)], "stop")


def test_a_client_that_leaves_frees_its_blocks(two: Server, client: openai.OpenAI) -> None:
    """The administrator sees a stream run, and, once its client has gone, no block held."""
    stream = client.completions.create(model=name_of(client), **ENDLESS)
    next(iter(stream))
    state = two.state()
    (running,) = state["running"]
    assert running["prompt_tokens"] == 2
    assert state["blocks"]["referenced"] == running["num_blocks"]
    assert [one["prompt_tokens"] for one in state["requests"]] == [[2]]
    stream.close()
    settle(two)


def test_sigterm_lets_streams_end(folder: Path) -> None:
    """What has begun is answered to its end, what comes then is a 503, and both processes end with status 0."""
    with served(str(folder), ["--tp", "2"]) as server, client_of(server) as client:
        stream = iter(client.completions.create(model=name_of(client), **ENDLESS))
        next(stream)
        reasons: list[Any] = []
        reading = threading.Thread(target=lambda: reasons.extend(piece.choices[0].finish_reason for piece in stream))
        reading.start()
        server.process.send_signal(signal.SIGTERM)
        refused, until = 0, time.monotonic() + 20
        while not refused and reading.is_alive() and time.monotonic() < until:
            refused = httpx.get(f"{server.url}/health", timeout=20).status_code == 503
        reading.join(60)
        assert refused
        assert reasons[-1] == "length"
        assert server.process.wait(60) == 0
