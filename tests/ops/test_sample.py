"""Filters, noise and choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentinfer.ops import sample as sampling
from agentinfer.state.columns import PARAMS
from agentinfer.state.plan import SamplingColumns

P = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
LOG_P = np.log(np.array(P)).astype(np.float32)


def columns(rows: Sequence[dict[str, Any]], banned: tuple[tuple[int, tuple[int, ...]], ...] = ()) -> SamplingColumns:
    params = np.zeros(len(rows), PARAMS)
    index = np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "index": 0, **row}
        index[i] = full.pop("index")
        for name, value in full.items():
            params[name][i] = value
    return SamplingColumns(params, index, banned)


def pick(logits: Any, rows: Sequence[dict[str, Any]], banned: Any = ()) -> tuple[list[int], list[bool]]:
    tokens, ok = sampling.sample(torch.as_tensor(logits), columns(rows, banned))
    assert tokens.dtype == torch.int64
    assert ok.dtype == torch.bool
    return tokens.tolist(), ok.tolist()


# ---------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("settings_", "want"),
    [
        ({"top_k": 3}, [0.5, 0.3125, 0.1875, 0, 0, 0]),
        ({"top_p": 0.70}, [0.5, 0.3125, 0.1875, 0, 0, 0]),
        ({"top_p": 0.39}, [1, 0, 0, 0, 0, 0]),
        ({"min_p": 0.2}, [0.444444444, 0.277777778, 0.166666667, 0.111111111, 0, 0]),
        ({"top_k": 4, "top_p": 0.85}, [0.5, 0.3125, 0.1875, 0, 0, 0]),
        ({"temperature": 0.5}, [0.614911606, 0.240199846, 0.086471945, 0.038431975, 0.013835511, 0.006149116]),
        ({"temperature": 0.5, "top_p": 0.8}, [0.719101124, 0.280898876, 0, 0, 0, 0]),
        ({"temperature": 2, "min_p": 0.5}, [0.344478137, 0.272333879, 0.210948916, 0.172239068, 0, 0]),
        ({"temperature": 2, "top_k": 2}, [0.55848156, 0.44151844, 0, 0, 0, 0]),
        ({"top_k": 0}, P),
        ({"top_k": -1}, P),
        ({"top_k": 6}, P),
        ({"top_k": 99}, P),
    ],
)
def test_the_filtered_distribution(settings_: dict[str, Any], want: list[float]) -> None:
    """O4, SMP-04: the exact distribution that each setting leaves."""
    p = sampling.probabilities(LOG_P, **{"temperature": 1.0, **settings_})
    np.testing.assert_allclose(p, want, atol=1e-6)
    assert [x > 0 for x in p] == [x > 0 for x in want]


def test_temperature_comes_first() -> None:
    """SMP-04: logits 3, 2, 1 at T 0.5 and top-p 0.8 leave the first alone."""
    p = sampling.probabilities(np.array([3, 2, 1], np.float32), 0.5, top_p=0.8)
    np.testing.assert_allclose(p, [1, 0, 0])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.39, [0]),
        (0.41, [0, 1]),
        (0.64, [0, 1]),
        (0.66, [0, 1, 2]),
        (0.70, [0, 1, 2]),
        (1.0, [0, 1, 2, 3, 4, 5]),
        (1e-9, [0]),
    ],
)
def test_top_p_is_the_smallest_set_that_reaches_p(top_p: float, kept: list[int]) -> None:
    """SMP-03: never the largest set under p, never an empty one; 1 filters nothing."""
    assert sampling.survivors(LOG_P, 1.0, top_p=top_p)[0].tolist() == kept


def test_top_p_of_one_filters_nothing_however_sums_round() -> None:
    """SMP-03: with 50,000 tokens all survive top-p 1."""
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32) * 8
    assert len(sampling.survivors(logits, 1.0, top_p=1.0)[0]) == 50_000


def test_ties_at_a_cut_keep_the_lowest_ids() -> None:
    """Exactly k survive top-k; of equal tokens at the cut of top-k or top-p the lowest ids stay."""
    logits = np.array([1, 3, 2, 2, 2, 3, 0], np.float32)
    assert sampling.survivors(logits, 1.0, top_k=4)[0].tolist() == [1, 2, 3, 5]
    assert sampling.survivors(logits, 1.0, top_k=1)[0].tolist() == [1]
    flat = np.zeros(10, np.float32)
    assert sampling.survivors(flat, 1.0, top_k=3)[0].tolist() == [0, 1, 2]
    assert sampling.survivors(flat, 1.0, top_p=0.3)[0].tolist() == [0, 1, 2]
    assert sampling.survivors(flat, 1.0, top_p=0.31)[0].tolist() == [0, 1, 2, 3]


def naive(logits: npt.NDArray[np.float32], t: float, k: int, p: float, least: float) -> list[int]:
    """The filters by their definition, in float64 over the float32 z."""
    z = ((logits - logits.max()) / np.float32(t)).astype(np.float64)
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if 0 < k < len(z):
        order = order[:k]
    if p < 1:
        mass = np.exp(z[order])
        total, reached, kept = mass.sum(), 0.0, []
        for i, m in zip(order, mass, strict=True):
            kept.append(i)
            reached += m
            if reached >= p * total * (1 - sampling.TIE):
                break
        order = kept
    return sorted(i for i in order if z[i] > -math.inf and (least <= 0 or z[i] >= math.log(least) - sampling.TIE))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(-6, 6).map(float), st.floats(-30, 30, width=32), st.just(-math.inf)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.integers(-1, 41),
    st.sampled_from([1.0, 0.99, 0.87, 0.5, 0.11, 1e-6]),
    st.sampled_from([0.0, 0.013, 0.3, 0.93]),
)
def test_the_filters_equal_their_definition(values: list[float], t: float, k: int, p: float, least: float) -> None:
    """Survivors equal a sort-and-loop definition for any logits with ties and -inf, in any combination of settings."""
    logits = np.array(values, np.float32)
    if logits.max() == -math.inf:
        logits[0] = 0
    ids, z = sampling.survivors(logits, t, k, p, least)
    assert ids.tolist() == naive(logits, t, k, p, least)
    assert len(ids) == len(z) > 0
    assert z.max() == 0


# ---------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    """The three known answers of Philox4x32-10 that its authors published (Random123 kat_vectors)."""
    a, b, c, d = (np.array([word], np.uint64) for word in counter)
    assert tuple(int(x[0]) for x in sampling.philox((a, b, c, d), key)) == want


def test_the_noise_is_fixed_for_good() -> None:
    """Noise is -log(-log((k + 1/2) 2^-23)) of the 23 high bits of lane id % 4 at counter (id // 4, index); the seed's
    halves are the key.
    """
    want = []
    for token in (0, 1, 2, 3, 4, 9, 70_000):
        words = [np.array([x], np.uint64) for x in (token // 4, 5, 0, 0)]
        lanes = sampling.philox((words[0], words[1], words[2], words[3]), (0x89ABCDEF, 0x01234567))
        u = ((int(lanes[token % 4][0]) >> 9) + 0.5) / 2**23
        want.append(np.float32(-math.log(-math.log(u))))
    noise = sampling.gumbel(0x0123456789ABCDEF, 5, np.array([0, 1, 2, 3, 4, 9, 70_000]))
    np.testing.assert_array_equal(noise, np.array(want))
    golden = sampling.gumbel(0, 0, np.arange(4))
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    np.testing.assert_allclose(golden, [-math.log(-math.log(((w >> 9) + 0.5) / 2**23)) for w in words], rtol=1e-6)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked() -> None:
    """Any subset of ids gets the noise that all ids get, bit for bit."""
    whole = sampling.gumbel(3, 4, np.arange(20_000))
    for ids in (np.array([19_999]), np.arange(1, 20_000, 7), np.arange(8191, 8194)):
        np.testing.assert_array_equal(sampling.gumbel(3, 4, ids), whole[ids])
    assert len(sampling.gumbel(3, 4, np.empty(0, np.int64))) == 0
    assert np.isfinite(whole).all()
    assert whole.max() < sampling.GUMBEL_MOST
    assert -math.log(-math.log(1 - 2.0**-24)) < sampling.GUMBEL_MOST


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 700)), max_size=70))
def test_noise_of_several_sequences_is_that_of_each(asked: list[tuple[int, int, int]]) -> None:
    """Whether computed together or apart, few ids or many, in whatever order: bit for bit."""
    rng = np.random.default_rng(len(asked))
    ids = [np.sort(rng.choice(5000, count, replace=False)) for _, _, count in asked]
    found = sampling.gumbels([seed for seed, _, _ in asked], [index for _, index, _ in asked], ids)
    for (seed, index, _), own, noise in zip(asked, ids, found, strict=True):
        np.testing.assert_array_equal(noise, sampling.gumbel(seed, index, own))


def test_seeds_of_64_bits_and_every_index_differ() -> None:
    """Seeds that differ in a high bit only, and neighbouring indices, give other noise."""
    ids = np.arange(64)
    noises = [
        sampling.gumbel(seed, index, ids) for seed, index in ((1, 0), (1 + 2**32, 0), (1 + 2**62, 0), (1, 1), (0, 1))
    ]
    assert all(not np.array_equal(a, b) for i, a in enumerate(noises) for b in noises[:i])


@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
def test_leaving_out_noise_that_cannot_win_changes_nothing(scale: float) -> None:
    """choose equals the plain argmax of z + noise over every token, ties to the lowest."""
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=3000).astype(np.float32) * np.float32(scale)
        z = logits - logits.max()
        want = int(np.argmax(z + sampling.gumbel(seed, 9, np.arange(3000))))
        assert sampling.choose(np.arange(3000), z, seed, 9) == want


@pytest.mark.parametrize("settings_", [{}, {"top_k": 3}, {"temperature": 2.0, "min_p": 0.2}])
def test_samples_follow_the_distribution(settings_: dict[str, Any]) -> None:
    """Chi-square over 1,500 output indices and over 1,500 seeds stays under the 99.99th percentile."""
    want = sampling.probabilities(LOG_P, **{"temperature": 1.0, **settings_})
    limit = {6: 25.7, 5: 23.5, 3: 18.4}[int((want > 0).sum())]
    for name in ("index", "seed"):
        tokens, ok = pick(np.tile(LOG_P, (1500, 1)), [{**settings_, name: i} for i in range(1500)])
        assert all(ok)
        counts = np.bincount(tokens, minlength=6)
        assert not counts[want == 0].any()
        expected = want[want > 0] * 1500
        assert ((counts[want > 0] - expected) ** 2 / expected).sum() < limit


# ---------------------------------------------------------------------------------------------- rows


def test_a_row_is_independent_of_its_batch_and_place() -> None:
    """The tokens of 12 mixed rows are the same alone, together, and in any order."""
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(0)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    ]
    rows = [{**kinds[i % 6], "seed": i * 17, "index": i} for i in range(12)]
    together, _ = pick(logits, rows)
    assert [pick(logits[i : i + 1], [rows[i]])[0][0] for i in range(12)] == together
    order = [5, 11, 0, 3, 2, 1, 10, 4, 9, 6, 8, 7]
    assert pick(logits[order], [rows[i] for i in order])[0] == [together[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("t", [0.0, 1e-12, 1e-9, 1e-5, 1e-4, 0.01])
def test_tiny_temperatures_are_safe(t: float, dtype: torch.dtype) -> None:
    """SMP-01: every small temperature, in every dtype, gives the largest logit and finite numbers."""
    logits = torch.tensor([[2.875, 2.955, 11.0625, -2.447], [-100, 100, 99, -100]], dtype=dtype)
    for seed in range(20):
        assert pick(logits, [{"temperature": t, "seed": seed}] * 2) == ([2, 1], [True, True])
    if t >= sampling.GREEDY_BELOW:
        np.testing.assert_array_equal(sampling.probabilities(logits[0].float().numpy(), t), [0, 0, 1, 0])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """Of equal largest logits the first is chosen."""
    wide = torch.zeros(1, 50_000)
    wide[0, [49_000, 777, 20_000]] = 3
    assert pick(wide, [{"temperature": 0}])[0] == [777]
    assert pick([[2.0, 5.0, 5.0, 5.0]], [{"temperature": 0}])[0] == [1]


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_rows_that_are_not_finite_fail_alone(t: float) -> None:
    """NaN, +inf or only -inf: ok is False and the token a valid id; the neighbours are what they are without them."""
    good = torch.randn(1, 8, generator=torch.Generator().manual_seed(2))
    inf = math.inf
    bad = torch.tensor(
        [
            [0, math.nan, 1, 2, 3, 4, 5, 6.0],
            [inf, 0, 0, 0, 0, 0, 0, 0],
            [-inf] * 8,
            [inf, -inf, math.nan, 0, 0, 0, 0, 0],
        ]
    )
    some = torch.tensor([[-inf, -inf, 3, -inf, -inf, -inf, -inf, -inf]])
    logits = torch.cat((good, bad, some, good))
    tokens, ok = pick(logits, [{"temperature": t, "seed": 5}] * 7)
    assert ok == [True, False, False, False, False, True, True]
    assert all(0 <= token < 8 for token in tokens)
    assert tokens[5] == 2
    assert tokens[0] == tokens[6] == pick(good, [{"temperature": t, "seed": 5}])[0][0]


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(t: float) -> None:
    """Banned ids of a sample are out before any filter, of that sample only; the logits are not written; a row with all
    banned is not ok.
    """
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]] * 3)
    before = logits.clone()
    rows = [{"temperature": t, "top_k": 1, "seed": 1}] * 3
    tokens, ok = pick(logits, rows, ((0, (0, 1)), (2, (0, 1, 2, 3))))
    assert tokens[:2] == [2, 0]
    assert ok == [True, True, False]
    assert torch.equal(logits, before)


def test_no_sample_at_all() -> None:
    """A step that samples nothing gives two empty tensors."""
    assert pick(torch.empty(0, 8), []) == ([], [])


def test_the_result_is_a_tensor_of_its_own() -> None:
    """Mixed greedy and noisy rows keep their places."""
    logits: Tensor = torch.eye(4) * 50
    assert pick(logits, [{"temperature": t} for t in (0, 1, 0, 1)])[0] == [0, 1, 2, 3]


def plainly(logits_SV: Tensor, params: Tensor, index: Tensor, tokens: Tensor, ok: Tensor) -> None:
    """A SampleRows of numpy: parameters from their bits."""
    for i, row in enumerate(logits_SV.numpy()):
        p = params[i].numpy().view(PARAMS)[0]
        fine = bool(np.isfinite(row.max())) and not np.isnan(row).any()
        ok[i] = int(fine)
        tokens[i] = 0
        if fine and p["temperature"] >= 1e-5:
            kept = sampling.survivors(row, *(p[name].item() for name in ("temperature", "top_k", "top_p", "min_p")))
            tokens[i] = sampling.choose(*kept, int(p["seed"]), int(index[i]))
        elif fine:
            tokens[i] = int(row.argmax())


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_sampling_on_the_device_chooses_as_the_host_does(seed: int, count: int) -> None:
    """Bans first, on a copy, then filters and noise: the host's tokens, and the logits stay."""
    rng = np.random.default_rng(seed)
    vocab = 37
    logits = torch.from_numpy((rng.integers(-8, 8, (count, vocab)) / 2).astype(np.float32))
    params = np.zeros(count, PARAMS)
    params["temperature"] = rng.choice([0.0, 0.4, 1.0, 3.0], count)
    params["top_p"] = rng.choice([1.0, 0.9, 0.5, 1e-6], count)
    params["min_p"] = rng.choice([0.0, 0.2, 1.0], count)
    params["top_k"] = rng.choice([0, -1, 1, 3, vocab, 1000], count)
    params["seed"] = rng.integers(0, 2**63 - 1, count)
    banned = tuple((i, (int(rng.integers(vocab)), 3)) for i in range(count) if rng.random() < 0.3)
    asked = SamplingColumns(params, rng.integers(0, 50, count).astype(np.int32), banned)
    want, fine = sampling.sample(logits, asked)
    before = logits.clone()
    got, ok = sampling.on_device(plainly)(logits, asked)
    assert torch.equal(logits, before)
    assert got.tolist() == want.tolist()
    assert ok.tolist() == fine.tolist()
    which = sampling.needs_filters(asked, vocab)
    part = sampling.subset(asked, which)
    assert [row for row, _ in banned] == [int(which[i]) for i, _ in part.banned]
    assert part.seed.tolist() == params["seed"][which].tolist()
