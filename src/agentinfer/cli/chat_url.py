"""`agentinfer chat --url`: as `chat`, with the model of a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from agentinfer.cli.bench_serve import model_of, remote_of
from agentinfer.cli.chat import Interrupt, Message, questions
from agentinfer.cli.interrupt import on_interrupt
from agentinfer.cli.usage import complain
from agentinfer.sse import Refused, Remote, events


def run(args: argparse.Namespace) -> int:
    """Answer until the questions end. 0, or 1 if an answer failed. Raises Usage if there is no server."""
    remote = remote_of(args.url, os.environ)
    model = args.model or model_of(remote)
    opening: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages, status = list(opening), 0
    for question in questions():
        if question == "/quit":
            break
        if question == "/new":
            messages = list(opening)
            continue
        asked = [*messages, {"role": "user", "content": question}]
        interrupt = Interrupt()
        with on_interrupt(interrupt):
            answer = asyncio.run(_answered(remote, {**_body(args, model), "messages": asked}, interrupt))
        if answer is None:
            status = 1
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]
    return status


def _body(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What the flags ask for, in the names of the API; those that are at their defaults are left out."""
    given = {
        "max_tokens": args.max_tokens,
        "top_p": args.top_p if args.top_p < 1 else None,
        "top_k": args.top_k or None,
        "min_p": args.min_p or None,
        "seed": args.seed,
        "stop": list(args.stop) or None,
        "stop_token_ids": list(args.stop_token_ids) or None,
        "ignore_eos": args.ignore_eos or None,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return {"model": model, "temperature": args.temperature, "stream": True, **asked}


async def _answered(remote: Remote, body: dict[str, Any], interrupt: Interrupt) -> str | None:
    """Print the answer as it comes, and give it, or what came before ctrl-c. None: refused or failed, and said so."""
    pieces: list[str] = []
    try:
        async for data in events(remote, "/v1/chat/completions", body):
            for choice in json.loads(data)["choices"]:
                piece = choice["delta"].get("content") or ""
                print(piece, end="", flush=True)
                pieces.append(piece)
            if interrupt.seen:
                break
    except (Refused, OSError, ValueError, LookupError) as error:
        complain(f"{error} (/new begins a new conversation)")
        return None
    answer = "".join(pieces)
    if not answer.endswith("\n"):
        print(flush=True)
    return answer
