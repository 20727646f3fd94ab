"""Load on a server: what is sent and when, what is counted, and the commands that talk with a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Generator

import pytest

from agentinfer.bench.load import SHAREGPT, Answer, Load, measure, plan, spread, summary
from agentinfer.cli import main
from agentinfer.loop import open_engine
from agentinfer.server.guard import Keys
from agentinfer.sse import Refused, Remote, events, get
from serving import Server, options, running, small, write_talker

SMALL = Load(requests=12, prompt_tokens=(3, 20), output_tokens=(2, 9), token_ids=(1, 200), concurrency=4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """One that all of these tests ask."""
    engine = open_engine(write_talker(tmp_path_factory.mktemp("talker")), small())
    with running(engine, options(keys=Keys(("secret",), ()))) as one:
        yield one
        one.quiet()


def test_a_plan_depends_on_its_seed_alone() -> None:
    """Equal loads send equal requests, others send others; lengths and ids are in their ranges."""
    jobs = plan(SMALL)
    assert jobs == plan(SMALL)
    assert jobs != plan(Load(**{**vars_of(SMALL), "seed": 1}))
    assert len(jobs) == 12
    assert all(3 <= len(job.prompt) <= 20 and 2 <= job.output_tokens <= 9 for job in jobs)
    assert all(1 <= token <= 200 for job in jobs for token in job.prompt)
    assert {job.at_s for job in jobs} == {0.0}


def vars_of(load: Load) -> dict[str, object]:
    return {name: getattr(load, name) for name in Load.__annotations__}


@pytest.mark.parametrize("arrivals", ["poisson", "fixed"])
def test_a_rate_is_kept(arrivals: str) -> None:
    """At a rate of R, N requests arrive in about N / R seconds; at fixed times, or at random ones."""
    jobs = plan(Load(**{**vars_of(SMALL), "requests": 4000, "rate": 50.0, "arrivals": arrivals}))
    times = [job.at_s for job in jobs]
    gaps = {round(b - a, 9) for a, b in itertools.pairwise(times)}
    assert times == sorted(times)
    assert times[-1] == pytest.approx(80, rel=0.1)
    assert (len(gaps) == 1) is (arrivals == "fixed")


def test_lengths_like_those_of_conversations() -> None:
    """Their logarithms have the mean that is documented, as far as the cuts let them."""
    jobs = plan(Load(**{**vars_of(SMALL), "requests": 4000, "lengths": "sharegpt"}))
    prompts, outputs = sorted(len(job.prompt) for job in jobs), sorted(job.output_tokens for job in jobs)
    for lengths, (mean, _) in ((prompts, SHAREGPT[0]), (outputs, SHAREGPT[1])):
        assert lengths[2000] == pytest.approx(2.718**mean, rel=0.1)
        assert (lengths[0], lengths[-1]) == (4, 1024)


def test_what_is_counted() -> None:
    """Failed requests count as such and nowhere else; times are of the others."""
    good = Answer(0.0, 0.5, 1.5, (0.4, 0.6), 10, 5)
    late = Answer(1.0, 0.5, 2.0, (), 10, 1)
    bad = Answer(0.5, 0.1, 0.1, (), 10, 0, "503: too busy", 503)
    found = summary(SMALL, [good, late, bad])
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"503: too busy": 1})
    assert found["duration_s"] == 3.0
    assert found["output_tokens_per_s"] == 2.0
    assert found["total_tokens_per_s"] == pytest.approx(26 / 3)
    assert found["ttft_ms"]["mean"] == 500
    assert found["tpot_ms"] == {"mean": 250, "p50": 250, "p99": 250, "max": 250}
    assert found["itl_ms"]["max"] == 600
    assert spread([])["p99"] == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_is_measured(server: Server, processes: int) -> None:
    """All requests are answered, with as many tokens as were asked for; the clients may be several processes."""
    load = Load(**{**vars_of(SMALL), "processes": processes, "warmup": 2})
    answers = measure(Remote(server.url, "secret"), "tiny", load)
    assert [one.error for one in answers] == [None] * 12
    assert [(one.prompt_tokens, one.output_tokens) for one in answers] == [
        (len(job.prompt), job.output_tokens) for job in plan(load)
    ]
    assert all(0 < one.first_s <= one.last_s for one in answers)
    assert all(one.last_s - one.first_s == pytest.approx(sum(one.gaps_s)) for one in answers)


def test_the_command(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench serve` prints a table, or JSON; 1 if a request failed; 2 where there is no server."""
    args = ["bench", "serve", "--url", server.url, "--requests", "5", "--token-ids", "1-200", "--prompt-tokens", "4"]
    args += ["--output-tokens", "3"]
    assert main(args) == 2
    assert "no API key" in capsys.readouterr().err
    monkeypatch.setenv("AGENTINFER_API_KEY", "secret")
    assert main(args) == 0
    assert "TTFT" in capsys.readouterr().out
    assert main([*args, "--json", "--rate", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["output_tokens"], found["model"]) == (5, 15, "tiny")
    assert main([*args, "--token-ids", "1000"]) == 1
    assert "5 times: 400:" in capsys.readouterr().err


def test_chat_with_a_server(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat --url` answers each question; what is refused is said, and the status is 1."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for question, status in (("hello\n/new\nhello\n", 0), ("x" * 600 + "\n", 1)):
        monkeypatch.setattr("sys.stdin", Lines(question))
        assert main(["chat", "--url", server.url, "--max-tokens", "5"]) == status
        out, err = capsys.readouterr()
        if status == 0:
            assert err == ""
            half = out[: len(out) // 2]
            assert out == half * 2 != ""
        else:
            assert "400: messages" in err
    assert main(["chat"]) == 2
    assert "give a MODEL, or --url" in capsys.readouterr().err


class Lines:
    """Mutable: standard input that is no terminal."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)

    def isatty(self) -> bool:
        return False

    def __iter__(self) -> Generator[str]:
        yield from self.lines


def test_what_is_no_server(server: Server) -> None:
    """Answers that are none, or end early, are refused in words; a port without a server is an OSError."""
    for answer in (b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                   b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{",
                   b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"):  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer_once, args=(listener, answer))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(Refused):
                asyncio.run(drain(url))
            thread.join()
        with pytest.raises(OSError):
            asyncio.run(get(Remote(url), "/v1/models"))
    with pytest.raises(Refused, match="404") as wrong:
        asyncio.run(get(Remote(f"{server.url}/v1/", "secret"), "/nothing"))
    assert wrong.value.status == 404


async def drain(url: str) -> None:
    async for _ in events(Remote(url), "/v1/completions", {}):
        pass


def answer_once(listener: socket.socket, data: bytes) -> None:
    line, _ = listener.accept()
    with line:
        line.recv(10000)
        line.sendall(data)
