"""Clients that are not installed for the other tests: the extra `clients`, and the system's chromium.

Run by name: `pytest tests/clients`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from playwright.sync_api import expect, sync_playwright

import sources
from agentinfer.build import Settings
from agentinfer.demo import default_cache, ensure_demo
from agentinfer.loop import open_engine
from agentinfer.server.site import Quotas
from serving import NAME, Server, command, options, running, slowed, small, write_talker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One whose answers are short."""
    with running(open_engine(folder, small()), options(quotas=Quotas(max_output_tokens=20))) as one:
        yield one
        one.quiet()


@pytest.fixture(scope="module")
def slow(folder: Path) -> Generator[Server]:
    """One whose steps take 10 ms."""
    with running(slowed(open_engine(folder, small()), 0.01)) as one:
        yield one
        one.quiet()


@pytest.fixture(scope="module")
def demo() -> Generator[Server]:
    """One of the demo model, by its name on the command line."""
    engine = open_engine(ensure_demo(default_cache(), print), Settings(num_blocks=400, max_model_len=512))
    with running(engine, options(names=("demo",))) as one:
        yield one
        one.quiet()


def test_it_shows_and_asks(slow: Server) -> None:
    """A browser shows the model and how busy it is, streams an answer, and can stop one."""
    complaints: list[Any] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page()
        view.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        view.on("pageerror", lambda error: complaints.append(error))
        view.goto(f"{slow.url}/")
        expect(view.locator("#health")).to_have_text("serving")
        expect(view.locator("#model")).to_have_text(NAME)
        view.fill("#prompt", "hello")
        view.fill("#max", "12")
        view.click("#send")
        expect(view.locator("#answer")).not_to_be_empty()
        expect(view.locator("#send")).to_be_enabled()
        view.fill("#max", "400")
        view.uncheck("#chat")
        view.click("#send")
        expect(view.locator("#running")).to_have_text("1")
        expect(view.locator("#blocks")).not_to_have_text("0 of 64")
        view.click("#stop")
        expect(view.locator("#running")).to_have_text("0")
        view.fill("#max", "5000")
        view.click("#send")
        expect(view.locator("#answer")).to_contain_text("max_model_len")
        expect(view.locator("#answer")).to_have_class("wrong")
        browser.close()
    assert [one for one in complaints if "400" not in str(one)] == []


def test_no_body_is_an_internal_error(server: Server, tmp_path: Path) -> None:
    """schemathesis finds no body that is a 500, an answer of another shape, or a status that is not documented."""
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
    schemathesis = command("schemathesis")
    assert schemathesis is not None
    done = subprocess.run(
        [schemathesis, "run", f"{server.url}/openapi.json", "-n", "40", "--checks", checks, "--seed", "1"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads(server.get("/health").text) == {"status": "ok"}


def test_langchain(server: Server) -> None:
    """LangChain's chat model answers whole and as a stream, and says how many tokens that took."""
    chat = ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", max_tokens=8, temperature=0)
    whole = chat.invoke("hello")
    assert whole.content == "".join(str(chunk.content) for chunk in chat.stream("hello"))
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 8


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("openai_client.py", r"""\[\d+ tokens\]\nweather {"city": ".+"}\n( +'.+' .*\n){6}(\d \+ \d = .+\n){8}$"""),
        ("langchain_chat.py", r"4.*\n.+"),
    ],
    ids=["openai", "langchain"],
)
def test_an_example_talks_to_a_server(name: str, says: str, demo: Server) -> None:
    """The demo model answers the scripts of examples/, which end well with nothing on standard error."""
    env = {**os.environ, "OPENAI_BASE_URL": f"{demo.url}/v1"}
    given = [sys.executable, str(sources.ROOT / "examples" / name)]
    done = subprocess.run(given, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(says, done.stdout), done.stdout
