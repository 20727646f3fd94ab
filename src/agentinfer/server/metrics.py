"""What happened so far, in numbers; the names are vLLM's where the meaning is the same.

Counted by the event loop's thread alone. prometheus-client writes them down when somebody asks.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from attrs import define, field
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from agentinfer.server.mail import Turned

_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_FIRST_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_BETWEEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0
)  # fmt: skip
_WHOLE_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0
)  # fmt: skip
_MEMORY_S: Final = 10.0
"""The measured speed is that of about so many busy seconds."""
HISTORY_S: Final = 600
"""Seconds whose tokens are kept, for the status page."""


@define(eq=False)
class Histogram:
    """Mutable: how often a number was at most each of `bounds`."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)


def observe(histogram: Histogram, value: float) -> None:
    """Count *value*."""
    histogram.counts[bisect_left(histogram.bounds, value)] += 1
    histogram.sum += value


@define(eq=False)
class Metrics:
    """Mutable. Times in seconds."""

    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 1
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(factory=dict[str, int])
    """Sequences by the reason of their end."""
    refused: dict[str, int] = field(factory=dict[str, int])
    """Requests that got another answer than theirs, by HTTP status."""
    queued_s: Histogram = field(factory=lambda: Histogram(_WHOLE_S))
    first_s: Histogram = field(factory=lambda: Histogram(_FIRST_S))
    between_s: Histogram = field(factory=lambda: Histogram(_BETWEEN_S))
    whole_s: Histogram = field(factory=lambda: Histogram(_WHOLE_S))
    prefill_s: Histogram = field(factory=lambda: Histogram(_WHOLE_S))
    decode_s: Histogram = field(factory=lambda: Histogram(_WHOLE_S))
    inference_s: Histogram = field(factory=lambda: Histogram(_WHOLE_S))
    """Prefill and decode."""
    per_token_s: Histogram = field(factory=lambda: Histogram(_BETWEEN_S))
    """The mean of a sequence."""
    prompts: Histogram = field(factory=lambda: Histogram(_TOKENS))
    outputs: Histogram = field(factory=lambda: Histogram(_TOKENS))
    steps: Histogram = field(factory=lambda: Histogram(_TOKENS))
    """Positions a step."""
    recent_positions: float = 0.0
    recent_s: float = 0.0
    history: deque[tuple[int, int]] = field(factory=lambda: deque[tuple[int, int]](maxlen=HISTORY_S))
    """(second, tokens generated in it), the seconds with none left out."""


def note_turn(metrics: Metrics, turned: Turned) -> None:
    """Count what a step did."""
    metrics.num_waiting, metrics.num_running = turned.num_waiting, turned.num_running
    metrics.num_free_blocks = turned.num_free_blocks
    metrics.preemptions += turned.num_preempted
    if turned.num_positions:
        observe(metrics.steps, turned.num_positions)
    kept = math.exp(-turned.busy_s / _MEMORY_S)
    metrics.recent_positions = metrics.recent_positions * kept + turned.num_positions
    metrics.recent_s = metrics.recent_s * kept + turned.busy_s


def note_tokens(metrics: Metrics, count: int) -> None:
    """Count *count* new tokens."""
    metrics.generation_tokens += count
    second = int(time.monotonic())
    if metrics.history and metrics.history[-1][0] == second:
        metrics.history[-1] = (second, metrics.history[-1][1] + count)
    elif count:
        metrics.history.append((second, count))


def note_end(
    metrics: Metrics, reason: str, prompt_tokens: int, cached: int, output_tokens: int, whole_s: float
) -> None:
    """Count a sequence that has ended."""
    metrics.finished[reason] = metrics.finished.get(reason, 0) + 1
    metrics.prompt_tokens += prompt_tokens
    metrics.cached_tokens += cached
    observe(metrics.prompts, prompt_tokens)
    observe(metrics.outputs, output_tokens)
    observe(metrics.whole_s, whole_s)


def note_phases(metrics: Metrics, begun_s: float, first_s: float, last_s: float, output_tokens: int) -> None:
    """Count what the time of a sequence went to: when its first step began, its first token came, and its last one."""
    observe(metrics.prefill_s, first_s - begun_s)
    observe(metrics.decode_s, last_s - first_s)
    observe(metrics.inference_s, last_s - begun_s)
    observe(metrics.per_token_s, (last_s - first_s) / max(output_tokens - 1, 1))


def note_refusal(metrics: Metrics, status: int) -> None:
    """Count an answer that is an error."""
    metrics.refused[str(status)] = metrics.refused.get(str(status), 0) + 1


def tokens_per_s(metrics: Metrics) -> float:
    """Positions, of prompts and of outputs, that the engine computes in a busy second; 0: not known yet."""
    return metrics.recent_positions / metrics.recent_s if metrics.recent_s > 0 else 0.0


def mean_output(metrics: Metrics) -> float:
    """Tokens of an output, on average; 128 before the first one."""
    count = sum(metrics.outputs.counts)
    return metrics.outputs.sum / count if count else 128.0


def generated_per_s(metrics: Metrics, seconds: int) -> list[int]:
    """Tokens generated in each of the last *seconds* whole seconds, the oldest first."""
    now, by_second = int(time.monotonic()), dict(metrics.history)
    return [by_second.get(second, 0) for second in range(now - seconds, now)]


def exposition(metrics: Metrics, model_name: str) -> bytes:
    """All of it, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics, model_name))
    return generate_latest(registry)


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Families(Collector):
    """What prometheus-client asks. Immutable, but for the metrics that it reads."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self.metrics, self.model_name = metrics, model_name

    def collect(self) -> Iterator[Family]:
        """Every family, in a fixed order."""
        m, labels = self.metrics, {"model_name": self.model_name, "engine": "0"}
        used = 1 - m.num_free_blocks / m.num_blocks
        yield _gauge("vllm:num_requests_running", "Sequences in a step.", m.num_running, labels)
        yield _gauge("vllm:num_requests_waiting", "Sequences that wait to be admitted.", m.num_waiting, labels)
        yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold, 1 is all.", used, labels)
        yield _counter("vllm:num_preemptions", "Preemptions.", m.preemptions, labels)
        yield _counter("vllm:prompt_tokens", "Prompt tokens of ended sequences.", m.prompt_tokens, labels)
        yield _counter("vllm:generation_tokens", "Generated tokens.", m.generation_tokens, labels)
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", m.prompt_tokens, labels)
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", m.cached_tokens, labels)
        yield _by("vllm:request_success", "Ended sequences.", "finished_reason", m.finished, labels)
        yield _by("agentinfer:http_errors", "Answers that are errors.", "status", m.refused, labels)
        yield _gauge("agentinfer:tokens_per_second", "Positions a busy second.", tokens_per_s(m), labels)
        for name, says, histogram in (
            ("vllm:request_queue_time_seconds", "From a request to its first step.", m.queued_s),
            ("vllm:time_to_first_token_seconds", "From a request to its first token.", m.first_s),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", m.between_s),
            ("vllm:e2e_request_latency_seconds", "From a request to its end.", m.whole_s),
            ("vllm:request_prefill_time_seconds", "From its first step to its first token.", m.prefill_s),
            ("vllm:request_decode_time_seconds", "From its first token to its last one.", m.decode_s),
            ("vllm:request_inference_time_seconds", "From its first step to its last token.", m.inference_s),
            ("vllm:request_time_per_output_token_seconds", "Mean time between its tokens.", m.per_token_s),
            ("vllm:request_prompt_tokens", "Prompt tokens a sequence.", m.prompts),
            ("vllm:request_generation_tokens", "Generated tokens a sequence.", m.outputs),
            ("vllm:iteration_tokens_total", "Positions a step.", m.steps),
        ):
            yield _histogram(name, says, histogram, labels)


def _gauge(name: str, says: str, value: float, labels: dict[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, says, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, says: str, value: float, labels: dict[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, says, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by(name: str, says: str, label: str, values: dict[str, int], labels: dict[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, says, labels=[*labels, label])
    for key, value in sorted(values.items()):
        family.add_metric([*labels.values(), key], value)
    return family


def _histogram(name: str, says: str, histogram: Histogram, labels: dict[str, str]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, says, labels=list(labels))
    counts = accumulate(histogram.counts)
    names = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    family.add_metric(list(labels.values()), list(zip(names, counts, strict=True)), histogram.sum)
    return family
