"""Sampling on a GPU: draws against the exact distribution, and edited logits in an engine with captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

import draws
from agentinfer.build import Settings
from agentinfer.loop import Engine, advance, generate, open_engine
from agentinfer.ops import edit
from agentinfer.ops.kernels.edit import edit_rows, enter_rows
from agentinfer.ops.kernels.sample import sample_tokens
from agentinfer.ops.sample import choose, survivors, words
from agentinfer.state.columns import PARAMS
from agentinfer.state.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = list(draws.CASES)
Folder = Callable[[str, str], Path]
Context = Callable[[], AbstractContextManager[None]]


def logits_of(name: str, count: int) -> Tensor:
    """*count* rows of a case, after its edits, by the kernel."""
    row = NAMES.index(name) + 1 if name.startswith("edited") else -1
    x = draws.edit_inputs([0] * count, [row] * count, [row] * count, device="cuda")
    raw = torch.from_numpy(draws.LOGITS)[None].cuda()
    return edit_rows(raw, x, draws.tables_of(torch.device("cuda")))


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_exact_distribution(name: str, batch: int) -> None:
    """100,000 draws of each filter, alone and together, in steps of one sample and of 64: half of one seed and many
    output indices, half of many seeds.
    """
    case, total = draws.CASES[name], 100_000 // batch * batch
    numbers = np.arange(total)
    many = numbers % 2 == 0
    asked = draws.columns(case, np.where(many, numbers, 7), np.where(many, 0, numbers).astype(np.int32))
    params, index = torch.from_numpy(words(asked)).cuda(), torch.from_numpy(asked.index).cuda()
    tokens, ok = torch.zeros((2, total), dtype=torch.int64, device="cuda")
    raw = logits_of(name, batch)
    for first in range(0, total, batch):
        step = slice(first, first + batch)
        sample_tokens(raw.clone(), params[step], index[step], tokens[step], ok[step])
    assert bool(ok.all())
    counts = torch.bincount(tokens, minlength=len(draws.LOGITS)).cpu().numpy()
    draws.check(counts, draws.exact(draws.edited(case), case), name)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_filtered_tokens_depend_on_nothing_else(spread: float) -> None:
    """256 rows of 151,936 logits of bfloat16, flat and peaked, with every kind of filter: the tokens are those of
    each row alone, of the batch reversed and of a captured graph, and but for float32's last bits the host's.
    """
    kinds: tuple[dict[str, float], ...] = (
        {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.1},
        {"top_k": 5000}, {"temperature": 0.0},
    )  # fmt: skip
    raw = spread * torch.randn((256, 151_936), generator=torch.Generator().manual_seed(1))
    raw = raw.to(torch.bfloat16).float()
    rows = np.zeros(256, PARAMS)
    rows["top_p"], rows["temperature"], rows["seed"] = 1, 0.8, np.arange(256) * 2**35 - 9
    for i, row in enumerate(rows):
        for name, value in kinds[i % 8].items():
            row[name] = value
    logits, index = raw.cuda(), torch.arange(256, dtype=torch.int32, device="cuda")
    params = torch.from_numpy(rows.view(np.int32).reshape(256, -1)).cuda()

    def chosen(which: Tensor) -> Tensor:
        tokens, ok = torch.zeros((2, len(which)), dtype=torch.int64, device="cuda")
        sample_tokens(logits[which], params[which], index[which], tokens, ok)
        assert bool(ok.all())
        return tokens

    together = chosen(torch.arange(256))
    assert torch.equal(chosen(torch.arange(255, -1, -1)).flip(0), together)
    assert torch.cat([chosen(torch.tensor([i])) for i in range(0, 256, 3)]).equal(together[::3])
    graph, out = torch.cuda.CUDAGraph(), torch.zeros((2, 256), dtype=torch.int64, device="cuda")
    sample_tokens(logits, params, index, out[0], out[1], pdl=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sample_tokens(logits, params, index, out[0], out[1], pdl=True)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out[0], together)
    asked = rows[:64].tolist()
    want = [
        int(x.argmax()) if p[0] == 0 else choose(*survivors(x, p[0], p[3], p[1], p[2]), p[4], i)
        for i, (x, p) in enumerate(zip(raw[:64].numpy(), asked, strict=True))
    ]
    assert sum(x != y for x, y in zip(together[:64].tolist(), want, strict=True)) <= 1


@pytest.mark.parametrize("vocab", [151_936, 5_001])
def test_edited_rows_are_those_of_the_reference(vocab: int) -> None:
    """Bias, penalties and bans of 64 of 256 rows, in one pass; and what they chose is entered in one."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    logits = 4 * torch.randn((256, vocab), generator=draw, device="cuda")
    tables = edit.EditTables(
        torch.randn((65, vocab), generator=draw, device="cuda"),
        torch.randint(0, 9, (65, vocab), generator=draw, device="cuda", dtype=torch.int32),
        torch.tensor([[0.5, 0.25, 1.3]], device="cuda").repeat(65, 1),
    )
    tables.bias[:, ::3] = float("-inf")
    rows, ours = torch.randperm(256)[:64].tolist(), range(1, 65)
    x = draws.edit_inputs(
        rows, [i if i % 3 else -1 for i in ours], [i if i % 2 else -1 for i in ours],
        [[j * 17 for j in range(i % 5)] for i in ours], sorted(rows), [*ours], "cuda",
    )  # fmt: skip
    got, want = edit_rows(logits, x, tables), edit.edit_rows(logits, x, tables)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    found, ends = torch.stack((want.argmax(-1), torch.ones_like(want.argmax(-1)))), list[tuple[Tensor, ...]]()
    for enter in (enter_rows, edit.enter_rows):
        chosen, last = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in ((2, 256), (65,)))
        counted = evolve(tables, counts=tables.counts.clone())
        enter(found, x, chosen, last, counted)
        ends.append((chosen, last, counted.counts))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def steps_up(tokens: Any, logits: Tensor) -> Tensor:
    """Tokens above the last one are likelier."""
    return logits + (torch.arange(len(logits), device=logits.device) > tokens[-1]) * 3.0


def opened(folder: Path, **changes: Any) -> Engine:
    base = Settings(
        device="cuda", num_blocks=600, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=1024, seed=0
    )
    return open_engine(folder, evolve(base, **changes), processors={"steps_up": steps_up})


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "top_p": 0.9},
    {"logit_bias": {5: 3.0, 7: -100}, "min_tokens": 4},
    {"allowed_token_ids": list(range(50)), "bad_words": [[3, 5], [5, 5], [8]], "top_k": 20},
    {"logits_processors": "steps_up", "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("overlap", [True, False])
def test_edits_in_graphs_and_without_are_the_same(tiny_folder: Folder, *, overlap: bool) -> None:
    """24 rows of every kind: captured and eager, together and each alone, in few blocks."""
    folder = tiny_folder("qwen3", "float32")
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 5 * (i % 7))] for i in range(24)]
    params = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, **ASKED[i % 6]) for i in range(24)]
    engine = opened(folder, overlap=overlap)
    together = [r.output_ids for r in generate(engine, prompts, params, progress=False)]
    for other in (opened(folder, overlap=overlap, eager=True), opened(folder, overlap=overlap, num_blocks=30)):
        assert [r.output_ids for r in generate(other, prompts, params, progress=False)] == together
    for i in range(12):
        (alone,) = generate(engine, [prompts[i]], params[i], progress=False)
        assert alone.output_ids == together[i]


def test_edits_on_the_device_wait_for_nothing(tiny_folder: Folder, never_waiting: Context) -> None:
    """No synchronizing call of torch in 100 steps of rows with bias, penalties, allowed ids and a bad word."""
    engine = opened(tiny_folder("qwen3", "float32"))
    asked = [*ASKED[:4], {"allowed_token_ids": list(range(50)), "bad_words": [[8]], "top_k": 20}]
    for i in range(24):
        params = SamplingParams(max_tokens=600, seed=i, ignore_eos=True, **asked[i % 5])
        engine.add(Request(tuple((7 * i + j) % 1000 for j in range(20)), params))
    for _ in range(30):
        engine.step()
    world = engine.world
    with never_waiting():
        for _ in range(100):
            world, output = advance(engine.machine, world)
            assert output is not None
            assert len(output.tokens) == 24


def test_rows_that_ask_for_nothing_pay_nothing(tiny_folder: Folder) -> None:
    """A request with penalties makes tables; before it there are none, and other rows' tokens are the same."""
    engine = opened(tiny_folder("qwen3", "float32"))
    plain = [SamplingParams(max_tokens=20, seed=i) for i in range(4)]
    before = [r.output_ids for r in generate(engine, [[1, 2]] * 4, plain, progress=False)]
    assert engine.world.device.edits.counts.numel() == 0
    engine.add(Request((5, 6), SamplingParams(max_tokens=60, seed=9, presence_penalty=1.0)))
    assert [r.output_ids for r in generate(engine, [[1, 2]] * 4, plain, progress=False)] == before
    assert engine.world.device.edits.counts.numel() > 0
