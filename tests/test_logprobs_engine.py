"""Log-probabilities of what an engine generates and of its prompts: against transformers, and however it runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import toys
from agentinfer import graphs
from agentinfer.build import Settings
from agentinfer.demo import default_cache, ensure_demo
from agentinfer.errors import InvalidRequest
from agentinfer.judging import MODES
from agentinfer.loop import Engine, Result, generate, open_engine, run, stream
from agentinfer.ops.inputs import by_hand, remember, stage
from agentinfer.ops.kv import allocate
from agentinfer.ops.sample import idle, needs_filters, probabilities, sample
from agentinfer.scoring import score
from agentinfer.state.check import violations
from agentinfer.state.history import rewind
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.plan import Plan
from agentinfer.state.request import Request, SamplingParams
from agentinfer.steps import Device, Flight, decode_step, prefill_step
from agentinfer.text import encode
from models import tiny
from test_ranks import threads, together
from tiny import write_tiny

CLOSE = 1e-4
THOUSAND = [int(t) for t in torch.randint(0, 90, (1000,), generator=torch.Generator().manual_seed(5))]
PROMPTS = [THOUSAND[:n] for n in (30, 1, 2, 17, 30)]
SAID = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)


def small(folder: Path, **changes: Any) -> Engine:
    """A small engine."""
    base = Settings(dtype="float32", block_size=4, num_blocks=300, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    return open_engine(folder, evolve(base, **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer."""
    return toys.folder_of(write_tiny(tmp_path_factory.mktemp("said"), vocab_size=280), toys.byte_level())


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_prompts_of_a_thousand_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """lm-eval's needs: 1,000 tokens in chunks, and what is generated after them, within 1e-4."""
    family, change = tiny.CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CASES", {"long": (family, {**change, "max_position_embeddings": 1024})})
        case = tiny.make("long", tmp_path)
    (result,) = generate(small(case.folder), [THOUSAND], evolve(SAID, top_p=0.9))
    tokens = [*THOUSAND, *result.output_ids]
    want = case.logits(tokens).double().log_softmax(-1)
    entries = [*whole(result.prompt_logprobs)[1:], *whole(result.outputs[0].logprobs)]
    assert whole(result.prompt_logprobs)[0] is None
    assert len(entries) == len(tokens) - 1
    for row, token, entry in zip(want, tokens[1:], entries, strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert abs(entry.logprob - float(row[token])) < CLOSE
        count = len(entry.top_ids)
        np.testing.assert_allclose(entry.top_logprobs, row.sort(descending=True).values[:count], atol=CLOSE)
        np.testing.assert_allclose(entry.top_logprobs, row[list(entry.top_ids)], atol=CLOSE)
        near = int(((row - row[token]).abs() < CLOSE).sum())
        assert abs(entry.rank - int((row > row[token]).sum()) - 1) < near
    assert {len(entry.top_ids) for entry in entries[:999] if entry} == {1}
    assert {len(entry.top_ids) for entry in entries[999:] if entry} == {2}


def whole(entries: tuple[Any, ...] | None) -> tuple[TokenLogprobs | None, ...]:
    """*entries*, which are there."""
    assert entries is not None
    return entries


def agree(one: Result, other: Result) -> None:
    """Equal tokens, and log-probabilities that differ by rounding at most."""
    for mine, yours in zip(one.outputs, other.outputs, strict=True):
        assert mine.output_ids == yours.output_ids
        near(whole(mine.logprobs), whole(yours.logprobs))
    near(whole(one.prompt_logprobs), whole(other.prompt_logprobs))


def near(mine: tuple[TokenLogprobs | None, ...], yours: tuple[TokenLogprobs | None, ...], atol: float = 1e-5) -> None:
    """The same, but for rounding."""
    for a, b in zip(mine, yours, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)
            np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=atol)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["reserve", "throughput"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"num_blocks": 16}],
    ids=str,
)
def test_they_do_not_depend_on_how_the_engine_runs(
    folder: Path, shape: dict[str, int], policy: str, *, overlap: bool
) -> None:
    """Chunks, batches, preemption, policy and overlap change nothing; nor does a prefix that others have cached."""
    want = [generate(small(folder), [prompt], SAID)[0] for prompt in PROMPTS]
    engine = small(folder, policy=policy, overlap=overlap, **shape)
    for _ in range(2):
        found = generate(engine, PROMPTS, SAID)
        for one, other in zip(found, want, strict=True):
            agree(one, other)
            assert one.cached_tokens == 0, "all of the prompt was computed"
    assert violations(engine.world.state) == []
    assert not engine.said


def test_a_step_judges_as_many_tokens_as_it_has_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits of prompts a step may have, all of them come, and others go on beside."""
    want = generate(small(folder), PROMPTS, SAID)
    monkeypatch.setattr("agentinfer.state.wanted.MOST_LOGITS", 280 * 3)
    engine = small(folder)
    plain = engine.add(Request(tuple(PROMPTS[0]), evolve(SAID, prompt_logprobs=None, max_tokens=3)))
    sizes: list[int] = []

    def watch(_event: Any, state: Any) -> None:
        if state.last is not None and state.last.scored is not None:
            sizes.append(len(state.last.scored.tokens))

    engine.note = watch
    for one, other in zip(generate(engine, PROMPTS, SAID), want, strict=True):
        agree(one, other)
    assert max(sizes) == 3
    assert [done.seq for done in run(engine, [plain])] == [plain]


def test_prompts_are_scored_as_by_score(folder: Path) -> None:
    """One op judges both: prompt log-probabilities are what `score` says of the same tokens."""
    engine = small(folder)
    (result,) = generate(engine, [PROMPTS[0]], SAID)
    (found,) = score(engine, [PROMPTS[0]], 1)
    entries = [entry for entry in whole(result.prompt_logprobs) if entry is not None]
    np.testing.assert_allclose([entry.logprob for entry in entries], found.logprobs, atol=1e-5)
    assert [entry.rank for entry in entries] == found.ranks.tolist()
    assert [list(entry.top_ids) for entry in entries] == found.top_ids.tolist()


def test_whoever_asks_for_nothing_gets_nothing(folder: Path) -> None:
    """In one batch each gets what it asked for; a plan of those who ask for none wants none."""
    each = [SAID, evolve(SAID, logprobs=None), evolve(SAID, prompt_logprobs=None, logprobs=0), SamplingParams(seed=1)]
    engine = small(folder)
    found = generate(engine, [PROMPTS[0]] * 4, [evolve(params, max_tokens=4) for params in each])
    assert [result.outputs[0].logprobs is not None for result in found] == [True, False, True, False]
    assert [result.prompt_logprobs is not None for result in found] == [True, True, False, False]
    assert {entry.top_ids for entry in whole(found[2].outputs[0].logprobs) if entry} == {()}
    generate(engine, [PROMPTS[0]], each[3])
    assert engine.world.state.last is not None
    assert (engine.world.state.last.logprobs, engine.world.state.last.scored) == (None, None)


RICH = SamplingParams(
    max_tokens=5, seed=11, temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, repetition_penalty=1.3, ignore_eos=True,
    logit_bias={7: 3.0}, logprobs=3,
)  # fmt: skip


@pytest.mark.parametrize("rich", [True, False])
def test_raw_ones_are_of_the_model_and_processed_ones_of_the_draw(folder: Path, *, rich: bool) -> None:
    """By default edits, temperature and filters are left out; processed ones are what the token was drawn from."""
    params = RICH if rich else SamplingParams(max_tokens=5, seed=11, temperature=0.7, top_p=0.8, top_k=9, logprobs=3)
    (raw,) = generate(small(folder), [PROMPTS[0]], params)
    (found,) = score(small(folder), [[*PROMPTS[0], *raw.output_ids]], 3)
    entries = [entry for entry in whole(raw.outputs[0].logprobs) if entry is not None]
    np.testing.assert_allclose([entry.logprob for entry in entries], found.logprobs[len(PROMPTS[0]) - 1 :], atol=1e-5)
    (processed,) = generate(small(folder, logprobs_mode="processed_logprobs"), [PROMPTS[0]], params)
    assert processed.output_ids == raw.output_ids
    for i, entry in enumerate(whole(processed.outputs[0].logprobs)):
        want = np.log(drawn(folder, [*PROMPTS[0]], list(raw.output_ids[:i]), params) + 1e-300)
        assert entry is not None
        assert abs(entry.logprob - want[entry.token_id]) < CLOSE
        best = np.sort(want)[::-1][:3]
        alive = best > -600
        np.testing.assert_allclose(np.array(entry.top_logprobs)[alive], best[alive], atol=CLOSE)
        assert all(math.isinf(value) for value in np.array(entry.top_logprobs)[~alive])


def drawn(folder: Path, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The distribution of the next token, by hand."""
    engine = small(folder)
    layouts = [layer.layout for layer in engine.world.device.kv.layers]
    kv = allocate(layouts, 64, 1, 64, torch.device("cpu"))
    x, kv = by_hand(kv, [[*prompt, *output]], [0], [list(range(1, 65))])
    logits = prefill_step(engine.machine, kv, x)[0][0].double().numpy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *output}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    return probabilities(logits.astype(np.float32), params.temperature, params.top_k, params.top_p, params.min_p)


def test_a_host_that_bans_tokens_late_is_judged_too(folder: Path) -> None:
    """Rows that wait for the host, for bad words of several tokens, have the same log-probabilities."""
    (plain,) = generate(small(folder), [PROMPTS[0]], evolve(SAID, temperature=0.0))
    never = [280 - 1, 280 - 2]
    params = evolve(SAID, temperature=0.0, bad_words=[never])
    (late,) = generate(small(folder), [PROMPTS[0]], params)
    agree(late, plain)
    banned = evolve(params, bad_words=[list(plain.output_ids[1:3])])
    (other,) = generate(small(folder), [PROMPTS[0]], banned)
    entry, third = whole(other.outputs[0].logprobs)[2], whole(plain.outputs[0].logprobs)[2]
    assert entry is not None
    assert third is not None
    assert (entry.rank > 1, third.rank, entry.top_ids) == (True, 1, third.top_ids)


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_graph_chose_is_judged_by_its_logits(folder: Path, mode: str, *, edits: bool) -> None:
    """With a stand-in for captured graphs, which has rows in an order of its own: those with filters are chosen there,
    or after it if there are edits, and all are judged as in eager steps.
    """
    filters = evolve(RICH, logit_bias={}, repetition_penalty=1.0)
    each = [SAID, RICH if edits else filters, evolve(filters, logprobs=0), SamplingParams(seed=2, top_k=5)]
    each = [evolve(params, max_tokens=6, ignore_eos=True) for params in each]
    want = generate(small(folder, logprobs_mode=mode), PROMPTS[:4], each)
    engine, replayed = small(folder, logprobs_mode=mode), list[int]()
    m = engine.machine

    def replay(device: Device, plan: Plan) -> tuple[Flight, Device] | None:
        rows = len(plan.rows)
        if not rows == len(plan.samples) == len(plan.slots):
            return None
        x, kv = stage(plan, device.kv, device.last)
        logits_SV, kv = decode_step(m, kv, x)
        left = graphs.left_of(m, plan)
        asked = idle(plan.sampling, sum(left, ()))
        tokens, ok = sample(logits_SV, asked)
        places = np.random.default_rng(plan.step).permutation(rows).astype(np.int32)
        chosen = torch.stack((tokens, ok.long()))
        replayed.append(len(needs_filters(asked, 280)))
        here = Device(kv, remember(device.last, x, tokens), device.edits)
        return graphs._after(m, logits_SV[torch.from_numpy(places).long()], chosen, here, plan, places, *left)

    engine.machine = evolve(m, replay=replay)
    for one, other in zip(generate(engine, PROMPTS[:4], each), want, strict=True):
        assert one.output_ids == other.output_ids
        assert (one.outputs[0].logprobs is None) == (other.outputs[0].logprobs is None)
        near(one.outputs[0].logprobs or (), other.outputs[0].logprobs or ())
    assert max(replayed) == (0 if edits else 3)


@pytest.mark.parametrize("params", [SAID, RICH, evolve(SAID, n=2)], ids=["plain", "rich", "two"])
def test_two_ranks_say_what_one_says(folder: Path, params: SamplingParams) -> None:
    """Rank 0 alone is asked; the other one computes the logits that are wanted, and no plan differs."""
    settings = Settings(block_size=4, num_blocks=300, max_num_seqs=8, max_num_batched_tokens=16, seed=0)
    want = generate(open_engine(folder, settings), PROMPTS, params)
    found, _ = together(folder, 2, threads, lambda engine: generate(engine, PROMPTS, params), settings)
    for one, other in zip(found, want, strict=True):
        for mine, yours in zip(one.outputs, other.outputs, strict=True):
            assert mine.output_ids == yours.output_ids
            near(whole(mine.logprobs), whole(yours.logprobs), 1e-4)
        near(one.prompt_logprobs or (), other.prompt_logprobs or (), 1e-4)


@pytest.mark.slow
def test_smollm2_says_of_a_prompt_what_transformers_says() -> None:
    """1,000 tokens of text, in float32: all log-probabilities within 1e-4."""
    from transformers import AutoModelForCausalLM

    folder = ensure_demo(default_cache(), print)
    words = " ".join(path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].glob("*.md")))
    engine = open_engine(folder, Settings(dtype="float32", num_blocks=100, max_model_len=1024))
    assert engine.text is not None
    ids = list(encode(engine.text, words))[:1000]
    (result,) = generate(engine, [ids], SamplingParams(max_tokens=1, prompt_logprobs=2))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    entries = whole(result.prompt_logprobs)
    assert len(entries) == 1000
    for row, token, entry in zip(want, ids[1:], entries[1:], strict=False):
        assert entry is not None
        assert abs(entry.logprob - float(row[token])) < CLOSE
        np.testing.assert_allclose(entry.top_logprobs, row.topk(2).values, atol=CLOSE)


# --- outputs, streams, forks, rewinding -------------------------------------------------------------------------------


def test_outputs_and_streams_tell_them_once(folder: Path) -> None:
    """What steps give, what a stream gives and what the result says are the same records."""
    (want,) = generate(small(folder), [PROMPTS[0]], SAID)
    engine, told, said = small(folder), [], {}
    seq = engine.add(Request(tuple(PROMPTS[0]), SAID))
    while engine.unfinished:
        output = engine.step()
        if output is not None:
            told += output.logprobs or ()
            for owner, first, entries in output.prompt_logprobs:
                assert owner == seq
                said |= dict(enumerate(entries, first))
    near(tuple(told), whole(want.outputs[0].logprobs))
    near(tuple(said.get(i) for i in range(30)), whole(want.prompt_logprobs))
    deltas = list(stream(engine, PROMPTS[0], SAID))
    assert deltas[-1].result is not None
    agree(deltas[-1].result, want)
    near(tuple(entry for delta in deltas for entry in delta.logprobs or ()), whole(want.outputs[0].logprobs))
    offsets = tuple(offset for delta in deltas for offset in delta.text_offsets or ())
    assert offsets == want.outputs[0].text_offsets
    assert deltas[-1].completion == deltas[-1].result.outputs[0]


def test_a_stream_may_ask_for_those_of_its_prompt_alone(folder: Path) -> None:
    """Pieces have none, the result has the prompt's."""
    params = evolve(SAID, logprobs=None)
    (want,) = generate(small(folder), [PROMPTS[0]], params)
    deltas = list(stream(small(folder), PROMPTS[0], params))
    assert [delta.logprobs for delta in deltas] == [None] * len(deltas)
    assert deltas[-1].result is not None
    assert deltas[-1].result.output_ids == want.output_ids
    near(whole(deltas[-1].result.prompt_logprobs), whole(want.prompt_logprobs))


@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_of_one_token_has_one_entry(folder: Path, *, beside: bool) -> None:
    """None, as nothing is before it, whoever else asks for what."""
    params = evolve(SAID, logprobs=None)
    results = generate(small(folder), [[7], *([PROMPTS[0]] if beside else [])], [params, *([SAID] if beside else [])])
    assert results[0].prompt_logprobs == (None,)


def test_offsets_count_characters(folder: Path) -> None:
    """API-01: each token's text begins where the text before it ends; a character is its last byte's token's."""
    ids = toys.byte_level().encode("h\N{LATIN SMALL LETTER E WITH ACUTE}l \N{GRINNING FACE}!").ids
    engine = small(folder)
    forced = [SamplingParams(max_tokens=1, logprobs=0, temperature=0.0, allowed_token_ids=[token]) for token in ids]
    pieces = [generate(engine, [[1]], params)[0].outputs[0] for params in forced]
    assert [piece.output_ids[0] for piece in pieces] == list(ids)
    assert {piece.text_offsets for piece in pieces} == {(0,)}
    (result,) = generate(engine, [PROMPTS[0]], evolve(SAID, max_tokens=40))
    text, offsets = result.text or "", result.outputs[0].text_offsets or ()
    assert len(offsets) == 40
    assert offsets[0] == 0
    assert list(offsets) == sorted(offsets)
    assert offsets[-1] <= len(text)


def test_a_stop_string_cuts_them_with_the_tokens(folder: Path) -> None:
    """As many as there are tokens, whatever was sampled after the stop string."""
    (free,) = generate(small(folder), [PROMPTS[0]], evolve(SAID, max_tokens=20))
    text = free.text or ""
    stop = text[len(text) // 2 :][:2]
    (cut,) = generate(small(folder), [PROMPTS[0]], evolve(SAID, max_tokens=20, stop=[stop]))
    assert len(whole(cut.outputs[0].logprobs)) == len(cut.output_ids) < 20
    near(whole(cut.outputs[0].logprobs), whole(free.outputs[0].logprobs)[: len(cut.output_ids)])


def test_a_fork_has_its_parents_and_a_rewind_loses_none(folder: Path) -> None:
    """A child tells of the tokens it inherited; a sequence that is taken back tells of all its tokens once."""
    params = evolve(SAID, max_tokens=8, prompt_logprobs=None)
    (want,) = generate(small(folder), [PROMPTS[0]], params)
    engine = small(folder)
    parent = engine.add(Request(tuple(PROMPTS[0]), params))
    for _ in range(5):
        engine.step()
    (child,) = engine.fork(parent)
    early = engine.world.state
    for _ in range(2):
        engine.step()
    engine.reset(rewind(early, engine.world.state))
    ends = {done.seq: done for done in run(engine, [parent, child])}
    assert ends.keys() == {parent, child}
    for done in ends.values():
        assert done.output == want.output_ids
        near(whole(done.logprobs), whole(want.outputs[0].logprobs))


def test_an_end_that_a_rewind_takes_back_knows_how_much_is_lost(folder: Path) -> None:
    """What was told with an end is gone: its tokens' log-probabilities are NaN, those of later ones are there."""
    params = evolve(SAID, max_tokens=4, prompt_logprobs=None)
    engine = small(folder, overlap=False)
    seq = engine.add(Request(tuple(PROMPTS[0]), params))
    for _ in range(4):
        engine.step()
    early = engine.world.state
    (first,) = run(engine, [seq])
    engine.reset(rewind(early, engine.world.state))
    (second,) = run(engine, [seq])
    assert first.output == second.output
    known = [not math.isnan(entry.logprob) for entry in second.logprobs or ()]
    assert known == sorted(known)
    assert 0 < sum(known) < 4 == len(known)


def test_a_nan_fails_its_request_alone(folder: Path) -> None:
    """The others' log-probabilities stand; the one that failed tells of the tokens it had."""
    engine = small(folder, prefix_cache=False)
    engine.machine.weights.embed[50] = float("nan")
    good, bad = generate(engine, [[1, 2, 3], [1, 50, 3]], SAID)
    assert (good.error, bad.finish_reason, bad.outputs[0].logprobs) == (None, "error", ())
    last = whole(bad.prompt_logprobs)[-1]
    assert last is not None
    assert math.isnan(last.logprob)
    assert not any(math.isnan(entry.logprob) for entry in whole(good.outputs[0].logprobs) if entry)


@pytest.mark.parametrize(
    ("name", "asked"), list(itertools.product(("logprobs", "prompt_logprobs"), (21, -1, True, 1.0)))
)
def test_what_is_out_of_range_is_refused(folder: Path, name: str, asked: Any) -> None:
    """SMP-07: by the field's name; the engine goes on."""
    engine = small(folder)
    with pytest.raises(InvalidRequest, match=name):
        engine.add(Request((1, 2), SamplingParams(**{name: asked})))
    assert generate(engine, [[1, 2]], SAID)[0].error is None
    assert generate(small(folder, max_logprobs=30), [[1]], evolve(SAID, logprobs=30))[0].error is None
