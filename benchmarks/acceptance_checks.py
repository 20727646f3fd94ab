"""What acceptance_tp4.py holds its figures against: the bounds of Qwen3-8B over four H200."""

from __future__ import annotations

import math

from attrs import frozen

GIB = 1 << 30
MARGIN = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Of the two likeliest tokens' logits: where it is larger the choice must be equal."""


@frozen
class Check:
    """One figure beside its bound."""

    part: str
    what: str
    value: float | None
    """None: it could not be measured here."""
    unit: str
    bound: float | None
    """None: there is none, the figure is told."""
    least: bool = False
    """The bound is the least that is allowed, not the most."""

    @property
    def met(self):
        """Whether the bound is kept; None: nothing to judge."""
        if self.value is None or self.bound is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound

    @property
    def verdict(self):
        if self.value is None:
            return "not measured"
        if self.bound is None:
            return "told"
        by = abs(self.value - self.bound)
        share = f" ({by / abs(self.bound):.0%})" if self.bound else ""
        return f"{'met' if self.met else 'MISSED'} by {number(by)}{share}"


def number(x):
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1_000 or x == int(x) else f"{x:.4g}"


def least_of(ranks, *path):
    """The least that any of *ranks* says at *path*; None if one does not say it."""
    return _over(min, ranks, path)


def most_of(ranks, *path):
    return _over(max, ranks, path)


def _over(pick, ranks, path):
    values = list(ranks)
    for name in path:
        values = [None if one is None else one.get(name) for one in values]
    return None if not values or None in values else pick(values)


def scaled(x, by):
    return None if x is None else x * by


def traces_clean(part, ranks):
    """That all ranks have a trace, and that none of them holds anything compiled, or a graph."""
    bad = None if any(not one.get("trace") for one in ranks) else sum(len(one["trace"]["forbidden"]) for one in ranks)
    yield Check(part, "kernels of inductor, compiled functions, graph launches in the traces", bad, "", 0)


def memory_checks(part, ranks, most_gib):
    peak, low = most_of(ranks, "peak_allocated"), least_of(ranks, "peak_allocated")
    yield Check(part, "torch.cuda.max_memory_allocated, most of the ranks", scaled(peak, 1 / GIB), "GiB", most_gib)
    apart = None if peak is None else (peak / low - 1) * 100
    yield Check(part, "ranks' memory apart", apart, "%", 2.0)


def busy_checks(part, watched):
    """*watched*: the highest utilisation of each GPU, in percent; empty: nobody could say."""
    yield Check(part, "GPU utilisation, least of the ranks' highest", min(watched, default=None), "%", 1, least=True)


def eager_checks(found):
    ranks, speed = found["ranks"], found["decode"]["tokens_per_s"]
    yield Check("eager", "batch 1", speed, "tok/s", 54, least=True)
    yield Check(
        "eager", "GPU busy a step, least of ranks", scaled(least_of(ranks, "trace", "busy_us"), 1e-3), "ms", 5.5
    )
    yield Check("eager", "sums a step, least of ranks", scaled(least_of(ranks, "trace", "sum_us"), 1e-3), "ms", 2.1)
    host = scaled(most_of(ranks, "host_ms"), 1 / found["layers"])
    yield Check("eager", "host a layer, most of ranks", host, "ms", 0.5)
    yield from traces_clean("eager", ranks)
    yield from memory_checks("eager", ranks, 4.8)
    yield from busy_checks("eager", found["utilisation"])


def graphs_checks(found):
    speed = found["decode"]["tokens_per_s"]
    yield Check("graphs", "batch 1, must", speed, "tok/s", 300, least=True)
    yield Check("graphs", "batch 1, aim", speed, "tok/s", 450, least=True)
    yield from memory_checks("graphs", found["ranks"], 4.8)
    yield from busy_checks("graphs", found["utilisation"])


def choices_checks(found):
    yield Check("choices", f"other choices at margins above {found['margin']:g}", found["differ"], "", 0)
    yield Check("choices", "places with such a margin", found["clear_percent"], "%", None)
    yield Check("choices", "of them answered step by step", found["answered"], "", 1, least=True)


def lite_checks(found):
    ranks = found["ranks"]
    # One after attention, one after the feed-forward half, routed and shared experts together; one of the embedding.
    want = 2 * found["layers"] + 1
    got = least_of(ranks, "trace", "sums")
    yield Check("lite", f"sums a step beside {want}: two a layer, one of the embedding",
                None if got is None else abs(got - want), "", 0)  # fmt: skip
    yield from memory_checks("lite", ranks, 9.0)
    yield from traces_clean("lite", ranks)
    yield Check("lite", "batch 1, eager", found["decode"]["tokens_per_s"], "tok/s", None)


def http_checks(found):
    yield Check("http", "requests that failed", found["failed"], "", 0)
    yield Check("http", "output", found["output_tokens_per_s"], "tok/s", None)
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        for which in ("mean", "p99"):
            yield Check("http", f"{name}, {which}", found[key][which], "ms", None)


def load_checks(found):
    for name, words in (("batch", "a large batch"), ("mix", "the mix")):
        if name in found:
            yield Check("load", words, found[name], "tok/s", None)


def vllm_checks(found):
    for row, (theirs, ours) in found["rows"].items():
        yield Check("vllm", row, theirs, "tok/s", None)
        yield Check("vllm", f"{row}, ours beside it", None if ours is None else ours / theirs, "times", None)


def real_checks(found):
    yield Check("real", f"tokens of the answer {found['text']!r}", found["tokens"], "", 24, least=True)
    yield Check("real", "choices that are not transformers', at clear margins", found.get("differ"), "", 0)


CHECKS = {
    "eager": eager_checks, "graphs": graphs_checks, "choices": choices_checks, "lite": lite_checks,
    "http": http_checks, "load": load_checks, "vllm": vllm_checks, "real": real_checks,
}  # fmt: skip


def table(checks):
    """Lines of a markdown table."""
    yield "| part | what | value | bound | |"
    yield "|---|---|---|---|---|"
    for one in checks:
        bound = "" if one.bound is None else f"{'>=' if one.least else '<='} {number(one.bound)}"
        yield f"| {one.part} | {one.what} | {number(one.value)} {one.unit} | {bound} | {one.verdict} |"


def compared(answers, choices, margin):
    """How many tokens of *answers* are not the likeliest by *choices*, where these are sure: their two likeliest tokens
    are more than *margin* apart.
    """
    differ = clear = total = 0
    for one, other in zip(answers, choices, strict=True):
        first = len(one["prompt_ids"]) - 1  # whose logits chose the first token of the output
        for i, token in enumerate(one["output_ids"]):
            sure = other["margin"][first + i] > margin
            total, clear = total + 1, clear + sure
            differ += sure and other["likeliest"][first + i] != token
    share = 100 * clear / total if total else math.nan
    return {"margin": margin, "differ": differ, "answered": clear, "places": total, "clear_percent": share}


def judged(report):
    """The checks of all parts that have found something, and a line for each that has not."""
    checks, without = [], []
    for name, found in report.items():
        if "error" in found or "left_out" in found:
            without.append(
                f"{name}: {'FAILED' if 'error' in found else 'left out'}: {found.get('error') or found['left_out']}"
            )
        else:
            checks += CHECKS[name](found)
    return checks, without
