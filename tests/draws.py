"""What sampled tokens are distributed like: cases, their exact distributions by the rules, and a chi-square test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from agentinfer.ops.edit import EditInputs, EditTables, no_tables, tell
from agentinfer.state.columns import PARAMS
from agentinfer.state.ids import Row
from agentinfer.state.plan import SamplingColumns, Told
from agentinfer.state.request import Request, SamplingParams

F64 = npt.NDArray[np.float64]

LOGITS = np.array([2.0, 1.5, 1.5, 0.25, -0.5, 3.0, -4.0, 1.0, 0.0, 2.5, 1.5, -1.0], np.float32)
"""With ties, which the cuts of some cases meet."""
EDITS = {
    "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {3: 2.0, 5: -1.5},
    "allowed_token_ids": (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11), "bad_words": ((8,),),
}  # fmt: skip
CASES: Mapping[str, SamplingParams] = MappingProxyType({
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.15),
    "together": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.4),
    "edited": SamplingParams(**EDITS),
    "edited, together": SamplingParams(temperature=1.3, top_k=7, top_p=0.95, min_p=0.05, **EDITS),
})  # fmt: skip
PROMPT, OUTPUT = (1, 1, 2), (9, 9, 3)


def edit_inputs(
    source: Sequence[int],
    bias: Sequence[int],
    counts: Sequence[int],
    bans: Sequence[Sequence[int]] = (),
    samples: Sequence[int] = (),
    rows: Sequence[int] = (),
    device: str = "cpu",
) -> EditInputs:
    """Samples with these rows of the logits and of the tables (-1: of none), with these *bans* of each; *samples* and
    *rows*, where they are entered, are 0 and on unless given.
    """
    each = range(len(source))
    bans = bans or [()] * len(source)
    ends = np.cumsum([len(tokens) for tokens in bans], dtype=np.int32)
    begins = ends - np.array([len(tokens) for tokens in bans], np.int32)
    places = torch.tensor([source, bias, counts, begins.tolist(), ends.tolist(), samples or each, rows or each])
    tokens = torch.tensor([token for one in bans for token in one], dtype=torch.int32)
    asked, index = torch.zeros((len(source), 8), dtype=torch.int32), torch.zeros(len(source), dtype=torch.int32)
    moved = (x.to(device) for x in (places.to(torch.int32), tokens, asked, index))
    return EditInputs(tuple(samples or each), *moved)


def tables_of(device: object) -> EditTables:
    """What a device knows of a row for each case: row i + 1 of case i."""
    told = [Told(Row(i + 1), Request(PROMPT, params), (*PROMPT, *OUTPUT)) for i, params in enumerate(CASES.values())]
    return tell(no_tables(len(LOGITS), device), told)


def edited(params: SamplingParams) -> F64:
    """The logits after the edits of *params*, by hand."""
    x = LOGITS.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in OUTPUT:
        x[token] -= params.frequency_penalty
    for token in {*OUTPUT}:
        x[token] -= params.presence_penalty
    allowed = range(len(x)) if params.allowed_token_ids is None else params.allowed_token_ids
    gone = [token for token in range(len(x)) if token not in allowed or (token,) in params.bad_words]
    x[gone] = -np.inf
    return x


def exact(logits: F64, params: SamplingParams) -> F64:
    """The distribution of the token: temperature, top-k, top-p on the rest, min-p on that; ties to the lowest id."""
    p = np.exp((logits - logits.max()) / params.temperature)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[[i for i, mass in zip(order, before, strict=True) if mass >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def columns(params: SamplingParams, seeds: npt.NDArray[np.int64], index: npt.NDArray[np.int32]) -> SamplingColumns:
    """A sample for each seed and output index."""
    rows = np.zeros(len(seeds), PARAMS)
    rows["temperature"], rows["top_p"], rows["min_p"] = params.temperature, params.top_p, params.min_p
    rows["top_k"], rows["seed"] = params.top_k, seeds
    return SamplingColumns(rows, index, ())


def together(parts: list[SamplingColumns]) -> SamplingColumns:
    """Samples of several cases in one step, those of one after those of the other."""
    return SamplingColumns(
        np.concatenate([part.params for part in parts]), np.concatenate([part.index for part in parts]), ()
    )


def check(counts: npt.NDArray[np.int64], p: F64, name: str) -> None:
    """Assert that *counts* of draws may come from *p*: chi-square below what one of 30,000 fair ones exceeds."""
    assert not counts[p == 0].any(), f"{name}: drew {np.flatnonzero(counts * (p == 0))}, which the filters take away"
    want = p * counts.sum()
    rare = want < 10  # together one bin: each alone is far from normal
    seen, want = np.append(counts[~rare], counts[rare].sum()), np.append(want[~rare], want[rare].sum())
    seen, want = seen[want > 0], want[want > 0]
    found, df = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    most = df * (1 - 2 / (9 * df) + 4 * math.sqrt(2 / (9 * df))) ** 3  # Wilson and Hilferty, at 4 sigma
    assert found < most, f"{name}: chi-square {found:.1f} of {df} degrees of freedom, at most {most:.1f}"
