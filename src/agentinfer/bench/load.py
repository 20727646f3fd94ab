"""Load on a server that speaks OpenAI's API: requests of random lengths, at a rate or as many at once as allowed.

Times are those of the client: from sending a request to each event of its answer. A server that puts several tokens in
an event makes fewer, longer gaps; tokens are counted by its own usage, where it says it.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, Literal

import attrs
from attrs import field, frozen

from agentinfer.errors import AgentInferError
from agentinfer.sse import Refused, Remote, events

SHAREGPT: Final = ((4.2, 1.4), (4.9, 1.1))
"""(mean, standard deviation) of the logarithm of the lengths of prompts and of answers, about those of ShareGPT's
conversations; cut off at 4 and at 1,024 tokens.
"""
_START_S: Final = 2.0
"""For the processes to be there before the first request."""


@frozen
class Load:
    """What is sent, and when."""

    requests: int = 256
    prompt_tokens: tuple[int, int] = (100, 1024)
    """The shortest and the longest."""
    output_tokens: tuple[int, int] = (100, 1024)
    lengths: Literal["uniform", "sharegpt"] = "uniform"
    """sharegpt: those of SHAREGPT, and the two above are not looked at."""
    token_ids: tuple[int, int] = (1000, 30000)
    """The smallest and the largest id in prompts."""
    rate: float | None = None
    """Requests a second; None: the next one as soon as `concurrency` allows."""
    arrivals: Literal["poisson", "fixed"] = "poisson"
    concurrency: int = 256
    """Requests at once, at most."""
    temperature: float = 0.0
    warmup: int = 0
    """Requests before, which are not counted."""
    seed: int = 0
    processes: int = 1
    """The clients are shared out among so many processes of their own."""


@frozen
class Sent:
    """One request: when to send it, in seconds from the start, and how long it is."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@frozen
class Answer:
    """What came of one request."""

    sent_s: float
    """From the start."""
    first_s: float
    """From then, each of the three."""
    last_s: float
    gaps_s: tuple[float, ...] = field(converter=tuple)
    """Between two events."""
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    status: int = 200


def plan(load: Load, *, warmup: bool = False) -> list[Sent]:
    """The requests of *load*, or those of its warm-up. Equal loads send equal requests."""
    rng, at_s, sent = random.Random(f"{load.seed} {warmup}"), 0.0, list[Sent]()
    for _ in range(load.warmup if warmup else load.requests):
        if load.rate is not None and not warmup:
            at_s += rng.expovariate(load.rate) if load.arrivals == "poisson" else 1 / load.rate
        if load.lengths == "sharegpt":
            prompt, output = (round(min(max(rng.lognormvariate(*shape), 4), 1024)) for shape in SHAREGPT)
        else:
            prompt, output = rng.randint(*load.prompt_tokens), rng.randint(*load.output_tokens)
        sent.append(Sent(at_s, tuple(rng.randint(*load.token_ids) for _ in range(prompt)), output))
    return sent


def measure(remote: Remote, model: str, load: Load, jobs: Sequence[Sent] | None = None) -> list[Answer]:
    """Send *jobs*, or else the requests of *load*, after its warm-up; the answers, in the order of the requests.

    Raises AgentInferError if a process of clients dies.
    """
    if load.warmup:
        asyncio.run(run(remote, model, load, plan(load, warmup=True), load.concurrency, time.time()))
    jobs = plan(load) if jobs is None else jobs
    if load.processes == 1:
        return asyncio.run(run(remote, model, load, jobs, load.concurrency, time.time()))
    return _in_processes(remote, model, load, jobs)


def _in_processes(remote: Remote, model: str, load: Load, jobs: Sequence[Sent]) -> list[Answer]:
    command, count = [sys.executable, "-m", "agentinfer.bench.load"], load.processes
    job = {"url": remote.url, "key": remote.key, "model": model, "load": attrs.asdict(load)}
    shares = [[attrs.asdict(one, recurse=False) for one in jobs[part::count]] for part in range(count)]
    start = time.time() + _START_S

    def work(part: int) -> list[Answer]:
        slots = len(range(part, load.concurrency, count))
        given = json.dumps({**job, "start": start, "jobs": shares[part], "slots": slots})
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - this module
        if done.returncode != 0:
            raise AgentInferError(f"a process of clients ended with status {done.returncode}")
        said: list[dict[str, Any]] = json.loads(done.stdout)
        return [Answer(**one) for one in said]

    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(work, range(count)))
    return [parts[i % count][i // count] for i in range(len(jobs))]


async def run(
    remote: Remote, model: str, load: Load, jobs: Iterable[Sent], concurrency: int, start: float
) -> list[Answer]:
    """Send *jobs* at their times after *start* (of time.time), *concurrency* at once at most."""
    slots = asyncio.Semaphore(max(1, concurrency))

    async def one(job: Sent) -> Answer:
        await asyncio.sleep(max(0.0, start + job.at_s - time.time()))
        async with slots:
            return await ask(remote, model, load, job, start)

    return await asyncio.gather(*(one(job) for job in jobs))


async def ask(remote: Remote, model: str, load: Load, job: Sent, start: float) -> Answer:
    """One request. What goes wrong is in the answer."""
    body = {
        "model": model,
        "prompt": list(job.prompt),
        "max_tokens": job.output_tokens,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times, count, began = list[float](), 0, time.perf_counter()
    sent_s = time.time() - start
    try:
        async for data in events(remote, "/v1/completions", body):
            if b'"choices":[]' in data or b'"choices": []' in data:
                count = json.loads(data)["usage"]["completion_tokens"]
            else:
                times.append(time.perf_counter() - began)
    except (Refused, OSError) as error:
        status = error.status if isinstance(error, Refused) else 0
        took = time.perf_counter() - began
        return Answer(sent_s, took, took, (), len(job.prompt), 0, str(error), status)
    times = times or [time.perf_counter() - began]
    gaps = tuple(b - a for a, b in pairwise(times))
    return Answer(sent_s, times[0], times[-1], gaps, len(job.prompt), count or len(times))


def summary(load: Load, answers: Sequence[Answer]) -> dict[str, Any]:
    """The numbers of a run: times in milliseconds, of the requests that went well."""
    good = [one for one in answers if one.error is None]
    ended = max((one.sent_s + one.last_s for one in good), default=0.0)
    duration = ended - min((one.sent_s for one in good), default=0.0)
    output, prompt = sum(one.output_tokens for one in good), sum(one.prompt_tokens for one in good)
    slow = [(one.last_s - one.first_s) / (one.output_tokens - 1) for one in good if one.output_tokens > 1]
    errors: dict[str, int] = {}
    for one in answers:
        if one.error is not None:
            errors[one.error[:200]] = errors.get(one.error[:200], 0) + 1
    return {
        "load": attrs.asdict(load),
        "completed": len(good),
        "failed": len(answers) - len(good),
        "errors": errors,
        "duration_s": duration,
        "requests_per_s": len(good) / duration if duration else 0.0,
        "output_tokens_per_s": output / duration if duration else 0.0,
        "total_tokens_per_s": (output + prompt) / duration if duration else 0.0,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_ms": spread(one.first_s for one in good),
        "tpot_ms": spread(slow),
        "itl_ms": spread(gap for one in good for gap in one.gaps_s),
        "e2e_ms": spread(one.last_s for one in good),
    }


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum, in milliseconds; 0 of nothing."""
    found = sorted(seconds)
    if not found:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}

    def at(share: float) -> float:
        return found[min(len(found) - 1, round(share * (len(found) - 1)))] * 1e3

    return {"mean": sum(found) / len(found) * 1e3, "p50": at(0.5), "p99": at(0.99), "max": found[-1] * 1e3}


def child() -> None:
    """The main function of a process of clients: its job stands in its standard input."""
    job = json.loads(sys.stdin.read())
    given: dict[str, Any] = job["load"]
    for name in ("prompt_tokens", "output_tokens", "token_ids"):
        given[name] = tuple(given[name])
    mine = [Sent(one["at_s"], tuple(one["prompt"]), one["output_tokens"]) for one in job["jobs"]]
    work = run(Remote(job["url"], job["key"]), job["model"], Load(**given), mine, job["slots"], job["start"])
    answers = asyncio.run(work)
    sys.stdout.write(json.dumps([attrs.asdict(one) for one in answers]))


if __name__ == "__main__":
    child()
