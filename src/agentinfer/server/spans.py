"""One OpenTelemetry span for each request that the engine takes, under vLLM's names. The extra `otel`: import it where
spans are asked for.

A span is made when its request leaves, of what the desk knows by then: while a request runs, nothing is done for it. A
thread of the SDK sends spans by OTLP over HTTP. A collector that is not there costs spans, no answer; the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentinfer import __version__
from agentinfer.server.desk import Ticket

_log = logging.getLogger(__name__)
_FLUSH_S: Final = 3.0
"""For the last spans to be sent, when the server ends."""
_CARRIERS: Final = ("traceparent", "tracestate")
"""**Source**: W3C, "Trace Context"."""

Values = dict[str, str | int | float | list[str]]


@contextlib.contextmanager
def sent_to(endpoint: str) -> Generator[Tracer]:
    """A tracer whose spans go to *endpoint*, the URL as it is; those that are left go within 3 s at the end.

    OpenTelemetry's own variables of the environment hold for the rest: the service's name, headers, certificates.
    """
    own = {"service.name": "agentinfer", "service.version": __version__}
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    try:
        yield provider.get_tracer("agentinfer", __version__)
    finally:
        ending = threading.Thread(target=provider.shutdown, name="agentinfer-spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)
        if ending.is_alive():
            _log.warning("%s did not take the last spans within %g s", endpoint, _FLUSH_S)


def farewell(tracer: Tracer, model: str, headers: Mapping[str, str]) -> Callable[[Ticket], None]:
    """What makes a span of a request to *model* when it leaves: a child of the one that *headers* name, if they do."""
    carrier = {name: headers[name] for name in _CARRIERS if name in headers}
    return partial(_record, tracer, model, TraceContextTextMapPropagator().extract(carrier, Context()))


def _record(tracer: Tracer, model: str, parent: Context, ticket: Ticket) -> None:
    now_s, now_ns = time.monotonic(), time.time_ns()
    took_s = now_s - ticket.arrived_s
    values: Values = {"gen_ai.response.model": model, **_asked(ticket), **_took(ticket), "gen_ai.latency.e2e": took_s}
    span = tracer.start_span(
        "llm_request", parent, SpanKind.SERVER, values, start_time=now_ns - round(took_s * 1e9)
    )  # fmt: skip
    wrong = _wrong(ticket)
    if wrong is not None:
        span.set_status(Status(StatusCode.ERROR, wrong))
    span.end(now_ns)


def _asked(ticket: Ticket) -> Values:
    """What was asked, and how much came of it."""
    params = ticket.courses[0].item.params
    prompts = ticket.courses[:: params.n]
    values: Values = {
        "gen_ai.request.id": ticket.name,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(ticket.courses),
        "gen_ai.usage.prompt_tokens": sum(len(course.item.prompt) for course in prompts),
        "gen_ai.usage.completion_tokens": sum(course.count for course in ticket.courses),
        "gen_ai.response.finish_reasons": ["abort" if c.ended is None else c.ended.reason for c in ticket.courses],
    }
    return values if params.max_tokens is None else {**values, "gen_ai.request.max_tokens": params.max_tokens}


def _took(ticket: Ticket) -> Values:
    """Seconds. Of several sequences: until the first of them began, and until the last one's last token."""
    values: Values = {}
    queued_s = min((course.ended.queued_s for course in ticket.courses if course.ended is not None), default=None)
    first_s = min((course.first_s for course in ticket.courses if course.first_s is not None), default=None)
    last_s = max((course.last_s for course in ticket.courses if course.last_s is not None), default=None)
    if queued_s is not None:
        values["gen_ai.latency.time_in_queue"] = queued_s
    if first_s is not None and last_s is not None:
        values["gen_ai.latency.time_to_first_token"] = first_s - ticket.arrived_s
        values["gen_ai.latency.time_in_model_decode"] = last_s - first_s
        if queued_s is not None:
            values["gen_ai.latency.time_in_model_prefill"] = first_s - ticket.arrived_s - queued_s
            values["gen_ai.latency.time_in_model_inference"] = last_s - ticket.arrived_s - queued_s
    return values


def _wrong(ticket: Ticket) -> str | None:
    """Why *ticket* did not end well."""
    for course in ticket.courses:
        if course.ended is None:
            return "left before its end: the client has gone, its time was up, or the engine has failed"
        if course.ended.reason not in ("stop", "length"):
            return course.ended.detail
    return None
