"""The `openai` package and a server of this one: `agentinfer serve demo`, then `python examples/openai_client.py`.

The server needs the extras `serve` and `structured`, the latter for the tool that must be called.
"""

from __future__ import annotations

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
QUESTION = [{"role": "user", "content": "Why is the sky blue? One sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,  # a small model would go on with more, until max_tokens ends the call
        },
    },
}


def stream(client: OpenAI, model: str) -> None:
    """An answer as it comes, and what it cost."""
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=60, temperature=0.3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


def call(client: OpenAI, model: str) -> None:
    """A call of a tool, that the model must make."""
    asked = [{"role": "user", "content": "Is it raining in Bonn?"}]
    answer = client.chat.completions.create(
        model=model, messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=100, temperature=0
    )
    for one in answer.choices[0].message.tool_calls or ():
        print(one.function.name, one.function.arguments)


def likely(client: OpenAI, model: str) -> None:
    """How likely each token of a prompt is, and the next one."""
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs
    for token, logprob in zip(found.tokens, found.token_logprobs, strict=True):
        print(f"{token!r:>12} {'' if logprob is None else f'{logprob:.3f}'}")


async def many(model: str) -> None:
    """Several questions at once."""
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        prompts = [f"{n} + {n} =" for n in range(8)]
        asked = (client.completions.create(model=model, prompt=one, max_tokens=4, temperature=0) for one in prompts)
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            print(prompt, answer.choices[0].text.strip())


def main() -> int:
    """All of it."""
    with OpenAI(base_url=URL, api_key=KEY) as client:
        model = client.models.list().data[0].id
        for show in (stream, call, likely):
            show(client, model)
    asyncio.run(many(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
