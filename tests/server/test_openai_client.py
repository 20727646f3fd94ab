"""The `openai` package, unchanged, as a client."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from agentinfer.loop import open_engine
from agentinfer.server.guard import Keys
from serving import NAME, Server, options, running, says, small, with_forward

HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One that all of these tests ask, with a key."""
    with running(open_engine(folder, small()), options(keys=Keys(("secret",), ()))) as one:
        yield one
        one.quiet()


def client_of(server: Server, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_it_completes_and_chats(server: Server) -> None:
    """Completions and chats, whole and streamed, say the same."""
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME
        whole = client.completions.create(
            model=NAME, prompt="hello", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        pieces = list(client.completions.create(model=NAME, prompt="hello", max_tokens=8, temperature=0, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        answer = client.chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=8, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=NAME, messages=HELLO, max_completion_tokens=8, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == answer.choices[0].message.content
        assert chunks[-1].usage is not None
        assert answer.usage is not None
        assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
        assert answer.usage.prompt_tokens_details is not None


def test_many_at_once(server: Server) -> None:
    """The asynchronous client, with many requests at a time."""

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:

            async def one(i: int) -> str | None:
                stream = await client.chat.completions.create(
                    model=NAME, messages=HELLO, max_tokens=6, seed=i % 2, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(16)))

    answers = asyncio.run(ask())
    assert len(set(answers[::2])) == len(set(answers[1::2])) == 1


def test_tools(folder: Path) -> None:
    """Calls come as the client's own objects; its streaming helper accumulates them."""
    words = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    engine = says(open_engine(folder, small()), words)
    with running(engine, options(parser="hermes")) as server, client_of(server) as client:
        asked: Any = {"model": NAME, "messages": HELLO, "tools": [WEATHER]}
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bonn"}')
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or ()
        assert streamed.function.arguments == call.function.arguments
        assert final.choices[0].finish_reason == "tool_calls"


def test_errors_are_the_clients_own(server: Server) -> None:
    """Each status is the exception that the client has for it, with our words."""
    with client_of(server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model=NAME, prompt="x", temperature=-1)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=[])
    with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_an_error_in_a_stream(folder: Path) -> None:
    """What fails after a stream has begun is raised by the client."""
    engine = open_engine(folder, small())
    inner, calls = engine.machine.model.forward, [0]

    def forward(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise RuntimeError("planted")
        return inner(*given)

    with running(with_forward(engine, forward)) as server, client_of(server) as client:
        stream = client.completions.create(model=NAME, prompt=[5, 6], max_tokens=100, stream=True)
        with pytest.raises(openai.APIError, match="planted"):
            list(stream)
        assert client.completions.create(model=NAME, prompt=[5, 6], max_tokens=2).choices
