"""OpenTelemetry: one span a request, with vLLM's attributes; collectors that fail harm nobody."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from agentinfer.cli import main
from agentinfer.cli import serve as command
from agentinfer.loop import open_engine
from agentinfer.server import spans
from agentinfer.server.site import Quotas
from serve_faults import served
from serving import NAME, options, running, slowed, small

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETIONS = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans go; they are there once the server has ended."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "OTLPSpanExporter", lambda endpoint: exporter)
    return exporter


def by_id(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {str((span.attributes or {})["gen_ai.request.id"]): span for span in memory.get_finished_spans()}


@contextmanager
def collector() -> Generator[tuple[str, list[Any]]]:
    """A receiver of OTLP over HTTP: its URL, and the resources with their spans that came."""
    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
        finally:
            server.shutdown()
            thread.join()


def test_a_request_is_a_span(folder: Path, memory: InMemorySpanExporter) -> None:
    """What was asked, what came of it, how long it took; each endpoint, whole and streamed; refused ones are none."""
    asked = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, "ignore_eos": True}
    with running(open_engine(folder, small()), options(otlp_traces_endpoint="http://unused")) as server:
        two = server.post(COMPLETIONS, {"prompt": [[5, 6, 7], [8]], **asked, "request_id": "two"}).json()
        server.post("/v1/chat/completions", {**chat, "stream": True}, headers={"x-request-id": "streamed"})
        server.post("/generate", {"token_ids": [5], "request_id": "ids"})
        assert server.post(COMPLETIONS, {"prompt": "a", "temperature": -1}).status_code == 400
        assert server.post(COMPLETIONS, {"prompt": [100_000]}).status_code == 400
    found = by_id(memory)
    assert set(found) == {"cmpl-two", "chatcmpl-streamed", "gen-ids"}
    span = found["cmpl-two"]
    values = dict(span.attributes or {})
    took = {name: values.pop(f"gen_ai.latency.{name}") for name in (
        "time_in_queue", "time_in_model_prefill", "time_to_first_token", "time_in_model_decode",
        "time_in_model_inference", "e2e")}  # fmt: skip
    assert values == {
        "gen_ai.request.id": "cmpl-two",
        "gen_ai.response.model": NAME,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 4,
        "gen_ai.usage.prompt_tokens": two["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 20,
        "gen_ai.response.finish_reasons": ("length",) * 4,
    }
    assert 0 <= took["time_in_queue"] < took["time_to_first_token"] < took["e2e"]
    assert took["time_in_queue"] + took["time_in_model_prefill"] == pytest.approx(took["time_to_first_token"])
    assert took["time_in_model_prefill"] + took["time_in_model_decode"] == pytest.approx(
        took["time_in_model_inference"]
    )
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(took["e2e"], abs=1e-6)
    assert abs(span.end_time / 1e9 - time.time()) < 60
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert dict(found["chatcmpl-streamed"].attributes or {})["gen_ai.request.max_tokens"] == 4
    assert "gen_ai.request.max_tokens" not in (found["gen-ids"].attributes or {})


def test_the_clients_trace_goes_on(folder: Path, memory: InMemorySpanExporter) -> None:
    """W3C's traceparent makes the span a child; what can not be read begins a trace; what is not sampled is no span."""
    given = {
        "child": {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"},
        "odd": {"traceparent": "00-zz-1"},
        "none": {},
        "unsampled": {"traceparent": f"00-{TRACE}-{SPAN}-00"},
    }
    with running(open_engine(folder, small()), options(otlp_traces_endpoint="http://unused")) as server:
        for name, headers in given.items():
            body = {"prompt": [5], "max_tokens": 1, "request_id": name}
            assert server.post(COMPLETIONS, body, headers=headers).status_code == 200
    found = by_id(memory)
    assert set(found) == {"cmpl-child", "cmpl-odd", "cmpl-none"}
    child, roots = found["cmpl-child"], [found["cmpl-odd"], found["cmpl-none"]]
    assert child.parent is not None
    assert (f"{child.context.trace_id:032x}", f"{child.parent.span_id:016x}") == (TRACE, SPAN)
    assert child.context.trace_state.get("a") == "b"
    assert [root.parent for root in roots] == [None, None]
    assert len({span.context.trace_id for span in found.values()}) == 3


def test_what_goes_wrong_is_an_error(folder: Path, memory: InMemorySpanExporter) -> None:
    """A client that leaves and a deadline are errors, with the tokens that there were."""
    engine = slowed(open_engine(folder, small()), 0.01)
    chosen = options(otlp_traces_endpoint="http://unused", quotas=Quotas(request_timeout_s=0.5))
    with running(engine, chosen) as server:
        with server.client() as client:
            asked = {**ENDLESS, "stream": True, "request_id": "left"}
            with client.stream("POST", COMPLETIONS, json=asked) as answer:
                next(answer.iter_lines())
        assert server.post(COMPLETIONS, {**ENDLESS, "request_id": "late"}).status_code == 504
    found = by_id(memory)
    assert set(found) == {"cmpl-left", "cmpl-late"}
    for span in found.values():
        values = dict(span.attributes or {})
        assert span.status.status_code == StatusCode.ERROR
        assert values["gen_ai.response.finish_reasons"] == ("abort",)
        assert 0 < int(str(values["gen_ai.usage.completion_tokens"])) < 400


@pytest.mark.parametrize("more", [("--no-http-process",), ()], ids=["one process", "two"])
def test_a_collector_gets_them(folder: Path, more: tuple[str, ...]) -> None:
    """The command sends spans by OTLP over HTTP; those that it holds when SIGTERM comes are sent before it ends."""
    with collector() as (url, resources):
        with served(str(folder), ["--otlp-traces-endpoint", url, *more]) as server:
            for i in range(3):
                body = {"prompt": [5], "max_tokens": 2, "request_id": f"{i}"}
                assert httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
        (resource,) = resources
        facts = {one.key: one.value.string_value for one in resource.resource.attributes}
        assert facts["service.name"] == "agentinfer"
        sent = [span for scope in resource.scope_spans for span in scope.spans]
        ids = [one.value.string_value for span in sent for one in span.attributes if one.key == "gen_ai.request.id"]
        assert sorted(ids) == ["cmpl-0", "cmpl-1", "cmpl-2"]


@pytest.mark.parametrize("there", [True, False], ids=["it hangs", "nobody is there"])
def test_a_collector_that_fails_harms_nobody(folder: Path, caplog: pytest.LogCaptureFixture, *, there: bool) -> None:
    """Requests are answered, the end is bounded, and the log says what was lost."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if there:
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        with (
            caplog.at_level(logging.WARNING),
            running(open_engine(folder, small()), options(otlp_traces_endpoint=url)) as server,
        ):
            for _ in range(20):
                assert server.complete(prompt=[5], max_tokens=2)
            server.quiet()
            began = time.monotonic()
            server.end()
            server.thread.join(30)
            assert time.monotonic() - began < 8
    assert f"{url} did not take the last spans" in caplog.text


def test_nothing_is_loaded_unless_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the flag OpenTelemetry is never imported; with it and without the extra, the extra is named."""
    code = "import sys, agentinfer.server.run, agentinfer.cli.serve; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setattr(command, "_OTEL", ("opentelemetry.sdk", "nowhere.at.all"))
    assert main(["serve", str(folder), "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]) == 2
    assert "pip install 'agentinfer[otel]'" in capsys.readouterr().err
    assert main(["serve", str(folder), "--otlp-traces-endpoint", "127.0.0.1:4318"]) == 2
    assert "must be http://HOST:PORT/PATH" in capsys.readouterr().err
