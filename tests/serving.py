"""A server in a thread, over a tiny model, for tests: its address, its engine, and clients for it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from attrs import define, evolve, field, frozen

import toys
from agentinfer.build import Settings
from agentinfer.loop import Engine
from agentinfer.server.front import Options
from agentinfer.server.guard import Keys
from agentinfer.server.run import EngineDead, bind, serve
from agentinfer.state.engine import has_work
from agentinfer.text import encode
from tiny import write_tiny

NAME = "tiny"
NOBODY = Keys((), ())
COMMANDS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
"""A PATH by which the commands of this Python's environment are found, activated or not."""


def command(name: str) -> str | None:
    """Where the command *name* is, if it is installed."""
    return shutil.which(name, path=COMMANDS)


def write_talker(folder: Path, template: str | None = toys.CHATML) -> Path:
    """A tiny model with a tokenizer of bytes and a chat template."""
    tokenizer = toys.byte_level()
    toys.folder_of(folder, tokenizer, template)
    end = tokenizer.token_to_id("<|im_end|>")
    return write_tiny(folder, vocab_size=288, eos_token_id=end, max_position_embeddings=512)


def small(**more: Any) -> Settings:
    """Settings for a tiny pool."""
    return Settings(**{"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "seed": 0, **more})


def options(**more: Any) -> Options:
    """For tests: nothing takes long."""
    return Options(**{"names": (NAME,), "keys": NOBODY, "shutdown_timeout_s": 5.0, **more})


@frozen(eq=False)
class Server:
    """One that runs."""

    url: str
    port: int
    engine: Engine
    end: Callable[[], object]
    outcome: list[BaseException]
    """What `serve` raised."""
    thread: threading.Thread

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": 60.0, **more})

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion, which must go well."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chunks(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, which must be framed right."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events(answer.text))

    def quiet(self, within_s: float = 10.0) -> None:
        """Wait until nothing runs; every block must be free then."""
        until = time.monotonic() + within_s
        while has_work(self.engine.world.state) or self.engine.world.flight is not None:
            assert time.monotonic() < until, "requests are left"
            time.sleep(0.01)
        state = self.engine.world.state
        assert state.pool.num_available == state.limits.num_blocks
        assert len(state.order) == 0


def events(body: str) -> Iterator[Any]:
    """The JSON data of server-sent events; the last one must be [DONE]."""
    frames = body.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    for frame in frames[:-2]:
        assert frame.startswith("data: ")
        assert "\n" not in frame
        yield json.loads(frame.removeprefix("data: "))


@define(eq=False)
class _Begun:
    """Mutable: how to end it, once it has begun."""

    event: threading.Event = field(factory=threading.Event)
    end: Callable[[], object] = field(default=lambda: None)

    def __call__(self, end: Callable[[], object]) -> None:
        self.end = end
        self.event.set()


@contextmanager
def running(engine: Engine, chosen: Options | None = None, **more: Any) -> Generator[Server]:
    """A server for *engine*. It must end when told, and leave nothing behind."""
    listener, begun, outcome = bind("127.0.0.1", 0), _Begun(), list[BaseException]()
    port = listener.getsockname()[1]

    def work() -> None:
        try:
            serve(engine, listener, options() if chosen is None else chosen, ready=begun, **more)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.event.wait(20)
    server = Server(f"http://127.0.0.1:{port}", port, engine, begun.end, outcome, thread)
    try:
        yield server
    finally:
        if thread.is_alive():
            begun.end()
        thread.join(30)
        assert not thread.is_alive(), "the server hangs"
    assert all(isinstance(error, EngineDead) for error in outcome), outcome


def slowed(engine: Engine, seconds: float) -> Engine:
    """*engine*, each step of which takes so long at least."""
    inner = engine.machine.model.forward

    def forward(*given: Any) -> Any:
        time.sleep(seconds)
        return inner(*given)

    return with_forward(engine, forward)


def with_forward(engine: Engine, forward: Callable[..., Any]) -> Engine:
    """*engine*, whose model computes by *forward*."""
    engine.machine = evolve(engine.machine, model=evolve(engine.machine.model, forward=forward))
    return engine


def says(engine: Engine, words: str) -> Engine:
    """*engine*, whose model answers *words* to whatever it is asked, one request after the other."""
    text = engine.text
    assert text is not None
    script = [*encode(text, words, parse_special_tokens=True), *engine.machine.limits.eos_ids[:1]]
    inner, told = engine.machine.model.forward, [0]

    def forward(*given: Any) -> Any:
        logits_SV, kv = inner(*given)
        if len(logits_SV):
            token = script[told[0] % len(script)]
            told[0] += 1
            logits_SV = torch.zeros_like(logits_SV)
            logits_SV[:, token] = 100.0
        return logits_SV, kv

    # Without overlap no step is wasted after the last token, so the next request begins at the beginning.
    engine.machine = evolve(engine.machine, overlap=False)
    return with_forward(engine, forward)
