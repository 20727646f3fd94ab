"""Load, limits, keys, clients that leave, engines that fail, and the end: nothing hangs, nothing leaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from agentinfer.loop import open_engine
from agentinfer.server.guard import Keys
from agentinfer.server.run import EngineDead, bind, serve
from agentinfer.server.site import Quotas
from agentinfer.state.policy import throughput
from serving import Server, events, options, running, slowed, small, with_forward

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def slow(folder: Path) -> Generator[Server]:
    """A server with one row, whose steps take 10 ms."""
    with running(slowed(open_engine(folder, small(max_num_seqs=1)), 0.01)) as server:
        yield server
        server.quiet()


def read_some(server: Server, chunks: int, **body: Any) -> None:
    """Read so many chunks of a stream, and go."""
    with server.client() as client, client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for i, _ in enumerate(answer.iter_lines()):
            if i >= 2 * chunks:
                break


# --- clients that leave ----------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_reads_ends(slow: Server) -> None:
    """A client that goes in the middle of a stream frees its row, and the next client is served at once."""
    read_some(slow, 3, **ENDLESS)
    began = time.monotonic()
    assert slow.complete(prompt=[7], max_tokens=2)["usage"]["completion_tokens"] in (1, 2)
    assert time.monotonic() - began < 2
    slow.quiet()
    assert slow.engine.world.state.step < 60


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1}, {"prompt": [5] * 300}], ids=str)
def test_a_client_that_goes_early_is_noticed(slow: Server, more: dict[str, Any]) -> None:
    """Whatever was asked, and whether it runs, waits or is being read in: gone is gone."""
    with contextlib.suppress(httpx.TimeoutException):
        slow.post(COMPLETIONS, {**ENDLESS, "max_tokens": 200, **more}, timeout=0.15)
        pytest.fail("it was too fast")
    slow.quiet(5)
    assert slow.engine.world.state.step < 60


def test_a_slow_reader_gets_all_of_it(folder: Path) -> None:
    """Who reads slowly finds several tokens in a chunk, all of them in order, and holds up nobody."""
    with running(open_engine(folder, small())) as server:
        want = server.complete(**ENDLESS, temperature=0)["choices"][0]["text"]
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            body = httpx.Request("POST", server.url, json={**ENDLESS, "temperature": 0, "stream": True}).content
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.complete(prompt=[7], max_tokens=2)
            time.sleep(0.5)
            data = b""
            while piece := line.recv(4096):
                data += piece
        chunks = [part.partition(b"\r\n")[2] for part in data.partition(b"\r\n\r\n")[2].split(b"\r\n\r\n")]
        assert chunks
        text = data.decode().partition("\r\n\r\n")[2]
        pieces = [line for line in text.split("\r\n") if line.startswith("data: ")]
        said = list(events("".join(pieces)))
        assert "".join(chunk["choices"][0]["text"] for chunk in said) == want
        server.quiet()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_too_many_are_told_when_to_come_back(folder: Path) -> None:
    """What can not be queued gets 503 with Retry-After at once; what was accepted is served; then all is free."""
    engine = slowed(open_engine(folder, small(max_num_seqs=2)), 0.01)
    with running(engine, options(max_queued=4)) as server:
        asked = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: server.post(COMPLETIONS, asked), range(40)))
        served = [one for one in answers if one.status_code == 200]
        refused = [one for one in answers if one.status_code == 503]
        assert len(served) + len(refused) == 40
        assert 4 <= len(served) < 40
        assert all(one.json()["usage"]["completion_tokens"] == 20 for one in served)
        assert all(1 <= int(one.headers["retry-after"]) <= 600 for one in refused)
        assert {one.json()["error"]["code"] for one in refused} == {"overloaded"}
        server.quiet()
        assert server.complete(prompt=[5], max_tokens=1)
        load = server.get("/load").json()
        assert (load["queued_sequences"], load["queued_tokens"], load["server_load"]) == (0, 0, 0)


def test_queued_tokens_are_bounded(folder: Path) -> None:
    """A long prompt is told to come back while others wait, though there is room in the queue of requests."""
    chosen = options(max_queued_tokens=100, keys=Keys((), ("root",)))
    with running(open_engine(folder, small()), chosen) as server, ThreadPoolExecutor(1) as pool:
        root = {"Authorization": "Bearer root"}
        server.post("/admin/pause", {}, headers=root)
        job = pool.submit(server.post, COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 60})
        while server.get("/load").json()["queued_tokens"] != 70:
            time.sleep(0.01)
        answer = server.post(COMPLETIONS, {"prompt": [5] * 300, "max_tokens": 5})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        server.post("/admin/resume", {}, headers=root)
        assert job.result().status_code == 200
        assert server.post(COMPLETIONS, {"prompt": [5] * 300, "max_tokens": 5}).status_code == 200
        server.quiet()


def test_more_sequences_than_may_ever_wait(folder: Path) -> None:
    """A request that could never be queued is a 400, not a 503: to come back would not help."""
    with running(open_engine(folder, small()), options(max_queued=3)) as server:
        for field, body in (("prompt", {"prompt": [[5]] * 4}), ("n", {"prompt": [5], "n": 4})):
            answer = server.post(COMPLETIONS, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_deadline_ends_a_request(folder: Path) -> None:
    """What is not finished in time is aborted: 504, or an error as the last event of a stream."""
    engine = slowed(open_engine(folder, small()), 0.02)
    with running(engine, options(quotas=Quotas(request_timeout_s=0.3))) as server:
        answer = server.post(COMPLETIONS, ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        *chunks, last = server.chunks(COMPLETIONS, **ENDLESS)
        assert chunks
        assert last["error"]["code"] == "timeout"
        server.quiet()


def test_bodies_are_bounded(folder: Path) -> None:
    """A body that is larger than allowed is a 413, said in its head or not; one that does not come is a 408."""
    quotas = Quotas(max_body=2000, body_timeout_s=0.3)
    with running(open_engine(folder, small()), options(quotas=quotas)) as server:
        for content in (b"x" * 3000, iter([b"x" * 1500] * 2)):
            with server.client() as client:
                answer = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in line.recv(100)


def test_output_tokens_are_bounded(folder: Path) -> None:
    """More than --max-output-tokens is refused when asked for, and never given when not."""
    with running(open_engine(folder, small()), options(quotas=Quotas(max_output_tokens=9))) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 10}).json()["error"]["param"] == "max_tokens"
        said = server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}).json()
        assert said["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nX: "], ids=repr)
def test_a_head_that_does_not_come_is_given_up(folder: Path, sent: bytes) -> None:
    """A connection that never finishes the head of a request is closed, a second request's too; others are not."""
    with running(open_engine(folder, small()), options(head_timeout_s=0.3)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.settimeout(5)
            line.sendall(sent)
            assert line.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.settimeout(5)
            line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            data = b""
            while not data.endswith(b'{"status":"ok"}'):
                data += line.recv(1000)
            if sent:
                line.sendall(sent)
                assert line.recv(100) == b""
        with server.client() as client:
            assert client.get("/health").status_code == 200
            time.sleep(0.5)
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000], ids=["none", "long"])
def test_what_is_no_http(folder: Path, sent: bytes) -> None:
    """What is no request of HTTP, or has too long a head, is a 400 in the API's own shape, and the end."""
    with running(open_engine(folder, small())) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.settimeout(5)
            line.sendall(sent)
            data = b""
            with contextlib.suppress(ConnectionResetError):  # of what it did not read
                while piece := line.recv(1000):
                    data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# --- keys ------------------------------------------------------------------------------------------------------------

PATHS = ["/", "/v1/models", "/version", "/metrics", "/load", "/v1/nothing", "/docs", "/healthz", "/health/", "//health"]


def test_keys_open_all_but_health(folder: Path) -> None:
    """Once there are keys, every path but /health is denied without one, unknown ones too."""
    keys = Keys(("secret", "other"), ("root",))
    with running(open_engine(folder, small()), options(keys=keys)) as server:
        assert server.get("/health").status_code == 200
        for path in PATHS:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer root"}):
                answer = server.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        for headers in ({"Authorization": "Bearer secret"}, {"Authorization": "bearer other"}):
            assert server.get("/v1/models", headers=headers).status_code == 200
        assert server.get("/version", auth=("", "secret")).status_code == 200
        odd = server.get("/version", headers={"Authorization": b"Bearer \xff\xfe"})
        assert odd.status_code == 401
        for headers in ({}, {"Authorization": "Bearer secret"}):
            assert server.get("/admin/state", headers=headers).status_code == 401
        assert server.get("/admin/state", headers={"Authorization": "Bearer root"}).status_code == 200


def test_keys_do_not_share_cached_prompts(folder: Path) -> None:
    """What one key's client asked is not to be found, by time or usage, with another key."""
    with running(open_engine(folder, small()), options(keys=Keys(("a", "b"), ()))) as server:

        def cached(key: str) -> int:
            body = {"prompt": [9, 8] * 20, "max_tokens": 1}
            answer = server.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"})
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("a"), cached("b"), cached("a"), cached("b")] == [0, 0, 32, 32]


def test_nobody_administers_without_a_key(folder: Path) -> None:
    """Without an admin key the paths of the administrator are closed, not open."""
    with running(open_engine(folder, small())) as server:
        assert server.get("/admin/state").status_code == 403
        assert server.post("/admin/pause", {}).status_code == 403
        assert server.get("/health").status_code == 200


# --- the administrator -----------------------------------------------------------------------------------------------


def test_the_administrator(folder: Path) -> None:
    """Pause, look, abort, resume."""
    engine = slowed(open_engine(folder, small()), 0.01)
    with running(engine, options(keys=Keys((), ("root",)))) as server, ThreadPoolExecutor(2) as pool:
        root = {"Authorization": "Bearer root"}
        assert server.post("/admin/pause", {}, headers=root).json() == {"status": "paused"}
        assert server.get("/health").json()["error"]["code"] == "paused"
        jobs = [pool.submit(server.post, COMPLETIONS, {**ENDLESS, "request_id": str(i)}) for i in range(2)]
        while len((seen := server.get("/admin/state", headers=root).json())["requests"]) < 2:
            time.sleep(0.01)
        assert seen["paused"]
        assert len(seen["waiting"]) == 2
        assert seen["step"] == 0
        said = server.post("/admin/abort", {"request_id": "cmpl-0"}, headers=root).json()
        assert said == {"aborted": ["cmpl-0"]}
        assert jobs[0].result().json()["error"]["message"] == "aborted: by the administrator"
        assert server.post("/admin/resume", {}, headers=root).json() == {"status": "running"}
        assert jobs[1].result().status_code == 200
        assert server.get("/admin/trace", headers=root).status_code == 409
        server.quiet()


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_is_a_500(folder: Path) -> None:
    """The requests of a step that raises get the error, as an answer or as an event; the server goes on."""
    engine = open_engine(folder, small())
    inner, calls = engine.machine.model.forward, [0]

    def forward(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] in (4, 20):
            raise RuntimeError("planted")
        return inner(*given)

    with running(with_forward(engine, forward)) as server:
        answer = server.post(COMPLETIONS, ENDLESS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "planted" in answer.json()["error"]["message"]
        assert server.complete(prompt=[5], max_tokens=3)
        *chunks, last = server.chunks(COMPLETIONS, **ENDLESS)
        assert chunks
        assert "planted" in last["error"]["message"]
        assert server.get("/health").status_code == 200
        server.quiet()


def test_a_dead_engine_ends_the_server(folder: Path) -> None:
    """When the engine can not go on, those who wait are told, /health is 503 with the reason, and serve raises."""

    def policy(state: Any) -> Any:
        if state.step > 5:
            raise ZeroDivisionError("planted")
        return throughput(state)

    with running(open_engine(folder, small(), policy)) as server:
        answer = server.post(COMPLETIONS, ENDLESS)
        assert answer.status_code in (500, 503)
        assert "planted" in answer.json()["error"]["message"]
        health = server.get("/health")
        assert health.status_code == 503
        assert "planted" in health.json()["error"]["message"]
        assert server.post(COMPLETIONS, ENDLESS).json()["error"]["code"] == "engine_dead"
        server.thread.join(15)
        assert [type(error) for error in server.outcome] == [EngineDead]


def test_a_step_that_hangs_shows(folder: Path) -> None:
    """While a step takes longer than allowed, /health is 503."""
    gate, inner = threading.Event(), []

    def forward(*given: Any) -> Any:
        gate.wait(10)
        return inner[0](*given)

    engine = open_engine(folder, small())
    inner.append(engine.machine.model.forward)
    with running(with_forward(engine, forward), options(max_stall_s=0.2)) as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.post, COMPLETIONS, {"prompt": [5], "max_tokens": 1})
        time.sleep(0.5)
        assert server.get("/health").json()["error"]["code"] == "stalled"
        gate.set()
        assert job.result().status_code == 200
        assert server.get("/health").status_code == 200


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_those_who_have_begun(folder: Path) -> None:
    """Told to end, a server refuses what is new, finishes what has begun, and leaves."""
    with running(slowed(open_engine(folder, small()), 0.01)) as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.chunks, COMPLETIONS, prompt=[5], max_tokens=60, ignore_eos=True)
        while not server.engine.world.state.step:
            time.sleep(0.01)
        server.end()
        time.sleep(0.1)
        refused = server.post(COMPLETIONS, {"prompt": [5]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert server.get("/health").status_code == 503
        assert job.result()[-1]["choices"][0]["finish_reason"] == "length"
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert server.outcome == []
        server.quiet()


@pytest.mark.parametrize("twice", [False, True])
def test_the_end_does_not_wait_for_ever(folder: Path, *, twice: bool) -> None:
    """What is not finished at the end of its time, or when told twice, is aborted, and its client told."""
    chosen = options(shutdown_timeout_s=60.0 if twice else 0.3)
    with running(slowed(open_engine(folder, small()), 0.02), chosen) as server, ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(server.chunks, COMPLETIONS, **ENDLESS) for _ in range(20)]
        while server.get("/load").json()["server_load"] < 20:
            time.sleep(0.05)
        for _ in range(2 if twice else 1):
            server.end()
        for job in jobs:
            assert job.result()[-1]["error"]["message"] == "aborted: the server is shutting down"
        server.thread.join(10)
        assert not server.thread.is_alive()
        server.quiet()


def test_the_end_tells_those_whose_step_hangs(folder: Path) -> None:
    """Who can not even be aborted, for the engine hears nothing, is told so in the API's shape before the end."""
    entered, gate, engine = threading.Event(), threading.Event(), open_engine(folder, small())
    inner = engine.machine.model.forward

    def forward(*given: Any) -> Any:
        entered.set()
        gate.wait(30)
        return inner(*given)

    chosen = options(shutdown_timeout_s=0.1)
    with running(with_forward(engine, forward), chosen) as server, ThreadPoolExecutor(2) as pool:
        begun = pool.submit(server.chunks, COMPLETIONS, **ENDLESS)
        assert entered.wait(10)
        late = pool.submit(server.post, COMPLETIONS, ENDLESS)
        while server.get("/load").json()["server_load"] < 2:
            time.sleep(0.01)
        server.end()
        errors = [begun.result()[-1]["error"], late.result().json()["error"]]
        gate.set()
        assert all("has not ended" in error["message"] for error in errors), errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_command_with_0(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    """`agentinfer serve`, sent SIGTERM or SIGINT while it streams, finishes the stream and exits with 0; its trace is
    whole.
    """
    trace = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", "0", "--num-blocks", "64"]
    command += ["--record", str(trace), "--served-model-name", "tiny", "--admin-key", "root"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), line + process.stderr.read()
        url = line.split()[-1]
        chunks = 0
        body = {**ENDLESS, "stream": True}
        with httpx.Client(base_url=url) as client, client.stream("POST", COMPLETIONS, json=body, timeout=30) as answer:
            for said in answer.iter_lines():
                chunks += said.startswith("data: ")
                if chunks == 3:
                    recorded = httpx.get(f"{url}/admin/trace", headers={"Authorization": "Bearer root"})
                    assert recorded.text.startswith('{"agentinfer_trace"')
                    os.kill(process.pid, number)
                    chunks += 1
        assert said in {"", "data: [DONE]"}
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    replayed = subprocess.run(
        [sys.executable, "-m", "agentinfer", "replay", str(trace)], capture_output=True, check=False
    )
    assert replayed.returncode == 0, replayed


def test_importing_installs_no_signal_handler() -> None:
    """Importing the server leaves signals as they were."""
    code = (
        "import signal; before = [signal.getsignal(s) for s in (15, 2)]; import agentinfer.server.run; "
        "assert before == [signal.getsignal(s) for s in (15, 2)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_port_in_use_is_said(folder: Path) -> None:
    """A port that is taken is one line and exit status 2, before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("agentinfer: --host, --port: 127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_who_is_second_at_a_port_ends(folder: Path, *, apart: bool) -> None:
    """Two may be bound to a port while neither listens: the second one to listen fails, and does not wait for ever."""
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(EngineDead if apart else OSError, match="status 1" if apart else "in use"):
            serve(open_engine(folder, small()), second, options(apart=apart))


def test_two_commands_at_a_port(folder: Path) -> None:
    """Of two that start at once one says that the port is in use, with status 2, and the other serves."""
    with bind("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
    command = [sys.executable, "-m", "agentinfer", "serve", str(folder), "--port", port, "--num-blocks", "64"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while all(one.poll() is None for one in both) and time.monotonic() < deadline:
            time.sleep(0.05)
        failed, served = sorted(both, key=lambda one: one.poll() is None)
        assert failed.poll() == 2
        assert served.poll() is None
        assert "in use" in failed.communicate()[1]
    finally:
        for one in both:
            one.terminate()
            one.communicate(timeout=30)
