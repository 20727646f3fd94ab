"""`agentinfer chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

from attrs import define

from agentinfer.cli.interrupt import on_interrupt
from agentinfer.cli.opened import opened, params_of
from agentinfer.cli.usage import Usage, complain
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, stream
from agentinfer.state.request import SamplingParams
from agentinfer.text import Text, chat

Message = dict[str, str]


def run(args: argparse.Namespace) -> int:
    """Answer until the questions end. 0, or 1 if an answer failed. Raises Usage if the model can not chat."""
    if args.model is None:
        raise Usage("chat: give a MODEL, or --url (see --help)")
    params = params_of(args)
    opening: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
    with opened(args) as engine:
        if engine.text is None or not engine.text.templates.compiled:
            what = "tokenizer" if engine.text is None else "chat template"
            raise Usage(f"{args.model}: has no {what}, so it can not chat; use generate")
        if sys.stdin.isatty():
            print("/quit or ctrl-d ends, /new forgets the conversation, ctrl-c ends an answer early", file=sys.stderr)
        messages, status = list(opening), 0
        for question in questions():
            if question == "/quit":
                break
            if question == "/new":
                messages = list(opening)
                continue
            answer = answered(engine, engine.text, [*messages, {"role": "user", "content": question}], params)
            if answer is None:
                status = 1
            else:
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return status


def questions() -> Iterator[str]:
    """What the user says, a line each; blank lines are nothing. With a prompt and line editing at a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import_module("readline")  # input() edits lines once it is there
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        if said:
            yield said


@define
class Interrupt:
    """Mutable. The first ctrl-c is noted, for the loop to see between two steps; the second one ends the program."""

    seen: bool = False

    def __call__(self) -> None:
        """Note it. Raises KeyboardInterrupt the second time."""
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


def answered(engine: Engine, text: Text, messages: list[Message], params: SamplingParams) -> str | None:
    """Print the answer as it comes, and give it, or what came before ctrl-c. None: refused or failed, and said so."""
    pieces: list[str] = []
    interrupt, error = Interrupt(), None
    try:
        deltas = stream(engine, chat(text, messages), params)
        with on_interrupt(interrupt), closing(deltas):
            for delta in deltas:
                print(delta.text, end="", flush=True)
                pieces.append(delta.text)
                error = delta.result.error if delta.result is not None else None
                if interrupt.seen:
                    break
    except InvalidRequest as refused:
        complain(f"{refused} (/new begins a new conversation)")
        return None
    answer = "".join(pieces)
    if not answer.endswith("\n"):
        print(flush=True)
    if error is not None:
        complain(error)
        return None
    return answer
