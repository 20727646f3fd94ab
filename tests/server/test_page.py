"""The status page, in a browser that is there: Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentinfer.loop import open_engine
from agentinfer.server.guard import Keys
from serving import NAME, Server, options, running, slowed, small, write_talker

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One whose steps take 10 ms."""
    with running(slowed(open_engine(folder, small()), 0.01)) as one:
        yield one
        one.quiet()


def test_the_page_runs_nothing_but_its_own(server: Server) -> None:
    """It comes with a policy that names its own script and style by their hashes."""
    answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "innerHTML" not in answer.text


def test_it_can_be_left_out(folder: Path) -> None:
    """With --no-ui there is no page; with keys it is closed as everything else."""
    with running(open_engine(folder, small()), options(ui=False)) as server:
        assert server.get("/").status_code == 404
    with running(open_engine(folder, small()), options(keys=Keys(("secret",), ()))) as server:
        answer = server.get("/")
        assert answer.status_code == 401
        assert "Basic" in answer.headers["www-authenticate"]
        assert server.get("/", auth=("", "secret")).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or find_spec("playwright") is None, reason="needs chromium and playwright")
def test_it_shows_and_asks(server: Server) -> None:
    """A browser shows the model and how busy it is, streams an answer, and can stop one."""
    from playwright.sync_api import expect, sync_playwright

    complaints: list[Any] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page()
        view.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        view.on("pageerror", lambda error: complaints.append(error))
        view.goto(f"{server.url}/")
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
