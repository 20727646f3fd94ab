"""How processes that share a model start and end: together, by name, and soon."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import tiny
from agentinfer import ranks
from agentinfer.build import Settings
from agentinfer.cli import main
from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.loop import Engine, generate, open_engine
from agentinfer.ops import comm
from agentinfer.ops.comm import RankLost
from agentinfer.ranks import open_ranks
from agentinfer.scoring import score
from agentinfer.state.request import SamplingParams
from agentinfer.swap import swap_weights

TESTS = Path(__file__).parent
SETTINGS = Settings(device="cpu", num_blocks=64, max_num_seqs=4, seed=7)
PROMPTS = [[1, 2, 3], [4, 5]]
SOON_S = 10.0
TORCHRUN = "from torch.distributed.run import main; main()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("ranks"), max_position_embeddings=4096)


def params(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def children(of: int) -> set[int]:
    """The processes that *of* started and that still run, and theirs."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == of and state != "Z":
            found |= {int(entry.parent.name)} | children(int(entry.parent.name))
    return found


def ended_within(pids: set[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in stat(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@contextmanager
def no_child_left() -> Iterator[None]:
    """No process is left, and nothing that this one had opened: no pipe, no connection."""
    before = children(os.getpid())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    left = children(os.getpid()) - before
    assert not left, left
    assert [str(one.message) for one in said if one.category is ResourceWarning] == []


def planted(monkeypatch: pytest.MonkeyPatch, kind: str, rank: int, step: int) -> None:
    """Let children do *kind* instead (faulty_rank.py)."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(ranks, "_CHILD", f"import faulty_rank; faulty_rank.plant({kind!r}, {rank}, {step})")


@pytest.mark.parametrize("tp", [2, 4])
def test_processes_answer_as_one_rank(folder: Path, tp: int) -> None:
    """Tokens are those of one rank, more than once, with others at work beside them; no child is left."""
    want = [r.output_ids for r in generate(open_engine(folder, SETTINGS), PROMPTS, params())]
    with no_child_left(), open_ranks(folder, SETTINGS, tp) as engine:
        assert [r.output_ids for r in generate(engine, PROMPTS, params())] == want
        if tp == 2:  # a second engine, and ports that are picked, not fixed
            with open_ranks(folder, SETTINGS, tp) as other:
                assert [r.output_ids for r in generate(other, PROMPTS, params())] == want
        assert [r.output_ids for r in generate(engine, PROMPTS, params())] == want


def test_processes_score_swap_and_ask_rank_0s_host(folder: Path, tmp_path: Path) -> None:
    """What one rank can be asked beside steps, processes can, too; a logits processor is called by rank 0 alone."""
    other = tiny.write_tiny(tmp_path, lambda tensors: tensors["lm_head.weight"].neg_(), max_position_embeddings=4096)
    asked: list[int] = []

    def ban(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        asked.append(len(tokens))
        return logits.index_fill(-1, torch.tensor([int(logits.argmax())]), float("-inf"))

    def drive(engine: Engine) -> Any:
        plain = generate(engine, PROMPTS, params())
        second = generate(engine, PROMPTS, evolve(params(), logits_processors="ban"))
        before, version = score(engine, PROMPTS, top=2), swap_weights(engine, other)
        found = [r.output_ids for r in (*plain, *second, *generate(engine, PROMPTS, params()))]
        return found, version, [np.round(one.logprobs, 4).tolist() for one in (*before, *score(engine, PROMPTS))]

    want = drive(open_engine(folder, SETTINGS, processors={"ban": ban}))
    calls = sorted(asked)
    asked.clear()
    with no_child_left(), open_ranks(folder, SETTINGS, 2, processors={"ban": ban}) as engine:
        assert drive(engine) == want
    assert sorted(asked) == calls
    assert want[0][0] != want[0][2]


def at_work(folder: Path, tp: int, begun: Callable[[], None] = lambda: None, **more: Any) -> None:
    """Serve for long; *begun* is called once the engine is there."""
    with open_ranks(folder, SETTINGS, tp, **more) as engine:
        begun()
        for _ in range(100):
            generate(engine, PROMPTS, params(200))


@pytest.mark.parametrize(
    ("kind", "step", "says"),
    [
        ("raise", 5, r"rank 1 raised KeyError: 'out of luck'"),
        ("raise", -1, r"rank 1 raised KeyError: 'out of luck'"),
        pytest.param("exit", 5, r"rank 1 \(process \d+\) ended with status 3", marks=pytest.mark.slow),
        ("kill", 5, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        pytest.param("kill", -1, r"rank 1 \(process \d+\) was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_raises_ends_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int, says: str
) -> None:
    """Rank 0 raises RankLost with who and why, all end within 10 s of the step, and no child is left (DIST-01)."""
    planted(monkeypatch, kind, 1, step)
    times: list[float] = []
    with no_child_left(), pytest.raises(RankLost, match=says):
        at_work(folder, 2, lambda: times.append(time.monotonic()))
    assert len(times) == (step >= 0)
    assert all(time.monotonic() - begun < SOON_S for begun in times)


def test_an_error_of_the_block_ends_all(folder: Path) -> None:
    """What the block raises comes through, and nothing is left open."""
    with no_child_left(), pytest.raises(ZeroDivisionError), open_ranks(folder, SETTINGS, 2):
        raise ZeroDivisionError


class EndedSoon(subprocess.Popen[bytes]):
    """A process that has ended before anything can be written to it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        super().wait(20)


@pytest.mark.parametrize("popen", [subprocess.Popen, EndedSoon])
def test_a_child_that_can_not_even_start_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, popen: type[subprocess.Popen[bytes]]
) -> None:
    """Its end is said, whether it came before or after its job was written to it."""
    monkeypatch.setattr(ranks, "_CHILD", "import os; os._exit(7)")
    monkeypatch.setattr(ranks.subprocess, "Popen", popen)
    with no_child_left(), pytest.raises(RankLost, match=r"rank 1 \(process \d+\) ended with status 7"):
        at_work(folder, 2)


@pytest.mark.parametrize("kind", ["sleep", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named_after_the_step_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of three that wait for one, asleep or stopped, none is blamed; all end soon after the timeout (DIST-01)."""
    planted(monkeypatch, kind, 2, 3)
    times: list[float] = []
    with no_child_left(), pytest.raises(RankLost, match=r"rank 2 keeps rank [013] waiting for longer than 2 s in step"):
        at_work(folder, 4, lambda: times.append(time.monotonic()), step_timeout_s=2.0)
    assert time.monotonic() - times[0] < 2.0 + SOON_S


def killed_at_a_moment(folder: Path, tp: int, seed: int) -> None:
    """Kill a child of an engine at work."""
    chance = random.Random(seed)
    before = children(os.getpid())
    killed_at: list[float] = []

    def kill() -> None:
        time.sleep(chance.uniform(0.0, 0.6))
        killed_at.append(time.monotonic())
        os.kill(chance.choice(sorted(children(os.getpid()) - before)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with no_child_left(), pytest.raises(RankLost, match=r"rank [1-3] \(process \d+\) was killed by SIGKILL"):
        at_work(folder, tp, killer.start)
    killer.join()
    assert time.monotonic() - killed_at[0] < SOON_S


@pytest.mark.parametrize("seed", range(2))
def test_a_child_killed_at_any_moment_ends_all(folder: Path, seed: int) -> None:
    """Whenever a child is killed, rank 0 names it and all end within 10 s."""
    killed_at_a_moment(folder, 2 if seed else 4, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_child_killed_at_one_of_many_moments_ends_all(folder: Path, seed: int) -> None:
    """The same, at twenty moments."""
    killed_at_a_moment(folder, 2 if seed % 4 else 4, seed)


def command(folder: Path, *more: str, tp: int = 2, max_tokens: int = 4000) -> list[str]:
    model = ["generate", str(folder), "--device", "cpu", "--prompt-ids", "1,2", "--json", "--num-blocks", "300"]
    return [*model, "--ignore-eos", "--max-tokens", str(max_tokens), *(["--tp", str(tp)] if tp else []), *more]


def begun(arguments: list[str], **more: Any) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, **more)


def in_a_step(process: subprocess.Popen[str], count: int) -> set[int]:
    """Wait until *process* has *count* processes below it that all have loaded torch; which."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        below = children(process.pid)
        if len(below) >= count and all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in below):
            time.sleep(3.0)
            return below
        time.sleep(0.05)
    raise AssertionError("it did not start")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, None, marks=pytest.mark.slow),
    ],
)
def test_no_orphan_is_left_when_rank_0_ends(folder: Path, number: signal.Signals, status: int | None) -> None:
    """Whatever ends the process that was started, the others end within 10 s, and its status is not 0."""
    process = begun(["-m", "agentinfer", *command(folder)])
    below = in_a_step(process, 1)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert ended_within(below, SOON_S)
    assert process.returncode == status if status is not None else process.returncode
    if number == signal.SIGKILL:
        assert "agentinfer: rank 1: rank 0 died" in said


def test_a_command_names_the_rank_that_was_killed(folder: Path) -> None:
    """One line, status 1, within 10 s."""
    process = begun(["-m", "agentinfer", *command(folder)])
    (below,) = in_a_step(process, 1)
    os.kill(below, signal.SIGKILL)
    out, said = process.communicate(timeout=SOON_S)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(rf"agentinfer: rank 1 \(process {below}\) was killed by SIGKILL\n", said)


def test_torchrun_starts_the_ranks(folder: Path) -> None:
    """Under torchrun --tp is how many it started; rank 0 alone answers."""
    started = begun(["-c", TORCHRUN, "--nproc-per-node", "2", "-m", "agentinfer", *command(folder, tp=0, max_tokens=6)])
    out, said = started.communicate(timeout=90)
    assert started.returncode == 0, said
    (want,) = generate(open_engine(folder, SETTINGS), [[1, 2]], params(6))
    assert [json.loads(line)["output_ids"] for line in out.splitlines()] == [list(want.output_ids)]


def test_torchrun_ends_when_a_rank_is_killed(folder: Path) -> None:
    """No rank is left, the status is not 0, and the rank is named."""
    started = begun(["-c", TORCHRUN, "--nproc-per-node", "2", "-m", "agentinfer", *command(folder, tp=0)])
    below = in_a_step(started, 2)
    os.kill(max(below), signal.SIGKILL)
    _, said = started.communicate(timeout=60)
    assert ended_within(below, SOON_S)
    assert started.returncode
    # torchrun ends the other rank at once: that one says who died, if it gets so far, and torchrun does in any case.
    assert re.search(r"agentinfer: rank [01] died|rank +: [01] ", said)


STRAY = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "MASTER_ADDR": "127.0.0.1"}


def test_one_rank_knows_nothing_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one rank nothing distributed is touched, whatever stray variables say (DIST-02)."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("one rank touched distributed code")

    for name in ("_torch_distributed", "open_store", "connect"):
        monkeypatch.setattr(comm, name, refuse)
    for name in ("open_store", "connect", "listen", "dial"):
        monkeypatch.setattr(ranks, name, refuse)
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        for name, value in {**STRAY, "MASTER_PORT": str(occupied.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        assert main(command(folder, tp=0, max_tokens=3)) == main(command(folder, tp=1, max_tokens=3)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    with open_ranks(folder, SETTINGS, 1) as engine:
        assert isinstance(engine, Engine)


def test_stray_variables_do_not_change_where_ranks_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and its like, of whoever, are not looked at unless torchrun started this process (DIST-02)."""
    with socket.create_server(("127.0.0.1", 0)) as occupied, ExitStack() as stack:
        for name, value in {**STRAY, "MASTER_PORT": str(occupied.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        engine = stack.enter_context(open_ranks(folder, SETTINGS, 2))
        assert generate(engine, PROMPTS, params(2))[0].error is None


def test_torchrun_and_tp_must_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--tp that is not what torchrun started is wrong usage, and so is half of its variables."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, value in {**STRAY, "RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(command(folder, tp=2)) == 2
    assert "--tp: 2, but torchrun started 4 ranks" in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert main(command(folder, tp=4)) == 2
    assert "variables are not right: KeyError('MASTER_PORT')" in capsys.readouterr().err


def test_what_can_not_be_shared_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong tp, a device for all, a broken model: the error of one rank, and no process."""
    monkeypatch.setattr(ranks, "open_store", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(InvalidSetting, match="3 ranks can not share 4 heads and 2 KV heads; these can: 1, 2, 4"):
        open_ranks(folder, SETTINGS, 3).__enter__()
    with pytest.raises(InvalidSetting, match="each rank takes its own"):
        open_ranks(folder, evolve(SETTINGS, device="cpu:0"), 2).__enter__()
    with pytest.raises(CheckpointError):
        open_ranks(tmp_path, SETTINGS, 2).__enter__()
