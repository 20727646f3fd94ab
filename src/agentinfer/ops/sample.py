"""Choosing tokens from logits, and the noise that does it. Fixed for good: a seed gives the same tokens for ever.

Noise: Philox4x32-10 with key = (low, high 32 bits of the seed) and counter = (token id // 4, output index, 0, 0); lane
`token id % 4` of its result is x; k = x >> 9; u = (k + 0.5) * 2^-23; gumbel = -log(-log(u)), computed in float64 and
rounded to float32. The token of a row is argmax(z + gumbel) over the tokens that the filters leave, z = (logits - their
maximum) / temperature in float32, ties to the lowest id. So a token depends on (logits, parameters, seed, output index)
alone: not on the batch, the order of rows, chunks or preemption.

Order: what is done to logits before (agentinfer.sampling, ops/edit.py), banned ids to -inf, temperature, top-k, top-p
on the rest renormalised, min-p, the choice. Knows SamplingColumns; S samples, V vocabulary. Greedy rows never leave the
device; the others are chosen on the host.

**Source**: Salmon et al. 2011 (Philox); Gumbel 1954, Maddison et al. 2014 (the argmax).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentinfer.ops.inputs import put
from agentinfer.state.ids import F32, I64, some
from agentinfer.state.plan import SamplingColumns

Sample = Callable[[Tensor, SamplingColumns], tuple[Tensor, Tensor]]
"""(logits_SV, sampling) -> tokens [S] int64, ok [S] bool, on the logits' device."""
SampleRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(logits_SV float32, params [S, 8] int32, index [S] int32, tokens [S] int64, ok [S] int64): sampling, written to the
last two, all of it on the device without waiting, so that a graph can capture it. params are the bits of
state.columns.PARAMS. The logits are not written."""

GREEDY_BELOW = 1e-5
"""Temperatures below it choose the largest logit."""
GUMBEL_MOST = 16.7
"""No noise is larger: -log(-log(1 - 2^-24)) = 16.64."""
LIKELY = -3.0
"""Tokens of a larger z get their noise first."""
TIE = 1e-6
"""Relative slack of the top-p and min-p cuts, so that an exact equality is kept whatever the rounding."""

_LEVELS = (-1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -10.0)
"""Where to cut before sorting for top-p."""

U64 = npt.NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_UNUSED = np.uint64(9)
_PIECE = 8192
"""Ids whose noise is computed together: their arrays stay in the cache."""
_FEW = 256
"""Ids of one sample that are computed together with those of others."""
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[Any, Any]) -> tuple[U64, U64, U64, U64]:
    """Philox4x32-10: four words of 32 random bits for each counter (words of 32 bits, in uint64 arrays). *key*: one for
    all, or one each.

    **Source**: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    c0, c1, c2, c3 = counter
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = p0 >> _SHIFT, p1 >> _SHIFT
        high1 ^= c1
        high1 ^= k0
        high0 ^= c3
        high0 ^= k1
        p0 &= _LOW
        p1 &= _LOW
        c0, c1, c2, c3 = high1, p1, high0, p0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: int, index: int, ids: I64) -> F32:
    """The noise of each token id of *ids* (ascending) at output *index* of a sequence with *seed*. float32."""
    noise = np.empty(len(ids), np.float32)
    for at in range(0, len(ids), _PIECE):
        piece = ids[at : at + _PIECE]
        block = piece >> 2
        fresh = np.empty(len(block), np.bool_)
        fresh[0] = True
        np.not_equal(block[1:], block[:-1], out=fresh[1:])
        place = np.cumsum(fresh)
        place -= 1
        noise[at : at + _PIECE] = _gumbel(block[fresh], place, piece & 3, seed % 2**64, index)
    return noise


def gumbels(seeds: Sequence[int], index: Sequence[int], ids: Sequence[I64]) -> list[F32]:
    """`gumbel` of several sequences. Those of few ids are computed together: a call costs more than they do."""
    found: list[F32] = [np.empty(0, np.float32)] * len(ids)
    few = [i for i, own in enumerate(ids) if len(own) <= _FEW]
    for i in range(len(ids)):
        if len(ids[i]) > _FEW:
            found[i] = gumbel(seeds[i], index[i], ids[i])
    for at in range(0, len(few), _PIECE // _FEW):
        together = few[at : at + _PIECE // _FEW]
        count = [len(ids[i]) for i in together]
        flat = np.concatenate([ids[i] for i in together])
        key = np.repeat(np.array([seeds[i] % 2**64 for i in together], np.uint64), count)
        outputs = np.repeat(np.array([index[i] for i in together], np.uint64), count)
        noise = _gumbel(flat >> 2, np.arange(len(flat)), flat & 3, key, outputs).astype(np.float32)
        for i, own in zip(together, np.split(noise, np.cumsum(count)[:-1]), strict=True):
            found[i] = own
    return found


def _gumbel(block: I64, place: I64, lane: I64, seed: Any, index: Any) -> npt.NDArray[np.float64]:
    """The noise of ids 4 * block[place] + lane; writes *place*. *seed*, *index*: one for all, or one each block."""
    counter = block.astype(np.uint64)
    zero = np.zeros_like(counter)
    key = np.asarray(seed, np.uint64)
    lanes = philox((counter, zero + np.asarray(index, np.uint64), zero, zero), (key & _LOW, key >> _SHIFT))
    place *= 4
    place += lane
    u = (np.stack(lanes, axis=-1).reshape(-1).take(place) >> _UNUSED).astype(np.float64)
    u += 0.5
    u *= 2.0**-23
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


def _top_k(z_V: F32, k: int) -> I64:
    """Ids of the k largest, ascending; of equal ones the lowest ids."""
    edge = np.partition(z_V, len(z_V) - k)[len(z_V) - k]
    above = np.flatnonzero(z_V > edge)
    level = np.flatnonzero(z_V == edge)[: k - len(above)]
    return np.sort(np.concatenate((above, level)))


def _top_p(z: F32, p: float) -> I64:
    """Places in *z* of the smallest set of largest probabilities that reaches p, ascending; of equal ones the first.

    Only a part is sorted: all that lie above a level which holds enough mass.
    """
    mass = np.exp(z)
    goal = p * float(mass.sum(dtype=np.float64)) * (1 - TIE)
    able = np.arange(len(z))
    for level in _LEVELS:
        above = np.flatnonzero(z >= level)
        if float(mass[above].sum(dtype=np.float64)) >= goal:
            able = above
            break
    order = able[np.argsort(-z[able], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(mass[order], dtype=np.float64), goal))
    return np.sort(order[: reached + 1])


def survivors(
    logits_V: F32, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[I64, F32]:
    """The token ids that the filters leave, ascending, and their z. The row's maximum must be finite, the temperature
    at least 1e-5.

    *top_k* of 0 or less, or of the vocabulary or more, *top_p* of 1 and *min_p* of 0 are off. Exactly k tokens survive
    top-k. A token of probability exactly at the cut of min-p stays.
    """
    with np.errstate(over="ignore"):
        z = (logits_V - logits_V.max()) / np.float32(temperature)
    if 0 < top_k < len(z):
        ids = _top_k(z, top_k)
        z = z[ids]
    else:
        ids = np.arange(len(z), dtype=np.int64)
    if top_p < 1:
        kept = _top_p(z, top_p)
        ids, z = ids[kept], z[kept]
    if min_p > 0:
        kept = np.flatnonzero(z >= np.float32(math.log(min_p) - TIE))
        ids, z = ids[kept], z[kept]
    alive = z > -np.inf
    return (ids, z) if bool(alive.all()) else (ids[alive], z[alive])


def probabilities(
    logits_V: F32, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """The distribution that a row is sampled from, [V] float64: what `survivors` leaves, renormalised."""
    ids, z = survivors(logits_V, temperature, top_k, top_p, min_p)
    p = np.zeros(len(logits_V))
    p[ids] = np.exp(z.astype(np.float64))
    return p / p.sum()


def choose(ids: I64, z: F32, seed: int, index: int) -> int:
    """argmax of z + noise over *ids* (ascending, their largest z is 0): the token."""
    return choose_each([(ids, z)], [seed], [index])[0]


def choose_each(left: Sequence[tuple[I64, F32]], seeds: Sequence[int], index: Sequence[int]) -> list[int]:
    """The token of each of several samples, of which `survivors` has *left* these ids and their z."""
    return [token for _, token in best_each(left, seeds, index)]


def best_each(
    left: Sequence[tuple[I64, F32]], seeds: Sequence[int], index: Sequence[int]
) -> list[tuple[float, int]]:  # fmt: skip
    """(-score, token) of the best of each of several samples, of which *left* has some ids, ascending, and their z;
    (inf, 0) of none.

    Noise is computed only where it can matter: first for the likely tokens, whose best score then rules out most
    others.
    """
    likely = [z > z.max(initial=-np.inf) + LIKELY for _, z in left]
    near = [ids[first] for (ids, _), first in zip(left, likely, strict=True)]
    best: list[tuple[float, int]] = []
    for (_, z), first, ids, noise in zip(left, likely, near, gumbels(seeds, index, near), strict=True):
        if not len(ids):
            best.append((math.inf, 0))
            continue
        score = z[first] + noise
        at = int(score.argmax())
        best.append((-float(score[at]), int(ids[at])))
    rest = [(z >= -score - GUMBEL_MOST) & ~first for (_, z), first, (score, _) in zip(left, likely, best, strict=True)]
    open_ = [i for i, able in enumerate(rest) if some(able)]
    far = [left[i][0][rest[i]] for i in open_]
    for i, ids, noise in zip(
        open_, far, gumbels([seeds[i] for i in open_], [index[i] for i in open_], far), strict=True
    ):
        score = left[i][1][rest[i]] + noise
        at = int(score.argmax())
        best[i] = min(best[i], (-float(score[at]), int(ids[at])))
    return best


def words(s: SamplingColumns) -> npt.NDArray[np.int32]:
    """[S, 8] the bits of the parameters, as SampleRows takes them."""
    return np.ascontiguousarray(s.params).view(np.int32).reshape(len(s.params), -1)


def needs_filters(s: SamplingColumns, vocab_size: int) -> I64:
    """Which samples have top-k, top-p, min-p or banned ids to heed."""
    k = s.top_k
    noisy = s.temperature >= GREEDY_BELOW
    asked = noisy & ((s.top_p < 1) | (s.min_p > 0) | ((k > 0) & (k < vocab_size)))
    for row, _ in s.banned:
        asked[row] = True
    return np.flatnonzero(asked)


def idle(s: SamplingColumns, which: Sequence[int]) -> SamplingColumns:
    """*s*, of which the samples *which*, to be chosen later, are greedy with nothing banned: nothing is cheaper, and
    their logits are not written.
    """
    params = s.params
    if which:
        params = s.params.copy()
        params["temperature"][list(which)] = 0
    return SamplingColumns(params, s.index, ())


def subset(s: SamplingColumns, which: I64) -> SamplingColumns:
    """The samples *which* (ascending) of *s* alone."""
    place = {int(row): i for i, row in enumerate(which)}
    banned = tuple((place[row], ids) for row, ids in s.banned if row in place)
    return SamplingColumns(s.params[which], s.index[which], banned)


def on_device(choose_rows: SampleRows) -> Sample:
    """`sample` that never waits for its device: banned ids here, the rest by *choose_rows*."""

    def sample_on_device(logits_SV: Tensor, s: SamplingColumns) -> tuple[Tensor, Tensor]:
        logits, count, device = logits_SV.to(torch.float32), len(logits_SV), logits_SV.device
        if s.banned:
            logits = _ban(logits, s.banned)
        there = put(np.concatenate((words(s).reshape(-1), s.index)), device)
        tokens, ok = torch.empty((2, count), dtype=torch.int64, device=device)
        choose_rows(logits, there[: -count or None].view(count, -1), there[-count:], tokens, ok)
        return tokens, ok != 0

    return sample_on_device


def _ban(logits_SV: Tensor, banned: tuple[tuple[int, tuple[int, ...]], ...]) -> Tensor:
    """A copy with the banned ids of each sample at -inf."""
    rows = [row for row, ids in banned for _ in ids]
    tokens = [token for _, ids in banned for token in ids]
    where = torch.tensor((rows, tokens), dtype=torch.int64).to(logits_SV.device)
    return logits_SV.index_put((where[0], where[1]), logits_SV.new_tensor(float("-inf")))


def sample(logits_SV: Tensor, s: SamplingColumns) -> tuple[Tensor, Tensor]:
    """One token a sample: ([S] int64, [S] bool ok), on the logits' device. The logits are not written.

    ok is False where a row holds a NaN or +inf, or nothing but -inf: its token means nothing.
    """
    logits = logits_SV.to(torch.float32)
    if s.banned:
        logits = _ban(logits, s.banned)
    tokens = logits.argmax(-1)
    ok = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()
    noisy = np.flatnonzero(s.temperature >= GREEDY_BELOW)
    if len(noisy):
        index = torch.from_numpy(noisy).to(logits.device)
        rows = (logits if len(noisy) == len(logits) else logits.index_select(0, index)).cpu().numpy()
        fine = cast(list[bool], ok.index_select(0, index).tolist())
        params, outputs = s.params[noisy], s.index[noisy].tolist()
        columns = (params[name].tolist() for name in ("temperature", "top_k", "top_p", "min_p"))
        left = [
            survivors(row, *asked) if good else (np.zeros(1, np.int64), np.zeros(1, np.float32))
            for row, good, *asked in zip(rows, fine, *columns, strict=True)
        ]
        chosen = choose_each(left, params["seed"].tolist(), outputs)
        tokens.index_copy_(0, index, torch.tensor(chosen, dtype=torch.int64).to(logits.device))
    return tokens, ok
