"""Plant each fault of faults.py in a copy of the package, and see that the control plane's tests find it.

    python tests/mutants/run.py [--list] [--only NAME ...] [--jobs N]

Package and tests are copied once, so that nobody's editing gets into a run. The unmutated tree runs first and must
pass; what each test took there decides the order: quick tests first. Then come the faults, two at a time. A fault is
killed when a test fails, or takes ten times as long as it should ("timed out"). The exit status is 1 if one survives,
or no longer applies, and 2 if the unmutated tree fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from attrs import frozen
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/state", "tests/testing")
PATIENCE_S = 20.0
"""A test that is still running after this, and after ten times what it takes on the unmutated tree, is stopped."""


@frozen
class Verdict:
    """How one run of the tests ended."""

    outcome: str
    """passed, failed, timed out; or broken: the run itself means nothing."""
    test: str
    """The first test that failed."""
    why: str
    took_s: float
    seconds: dict[str, float]
    """What each test took."""


def take_tree(tree: Path) -> None:
    """Copy the package, the tests of the control plane and their settings to *tree*."""
    bare = shutil.ignore_patterns("__pycache__")  # no bytecode: what runs is what the text says
    shutil.copytree(ROOT / "src" / "agentinfer", tree / "package" / "agentinfer", ignore=bare)
    for folder in TESTS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=bare)
    for path in (ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")):
        shutil.copy(path, tree / path.relative_to(ROOT))


def fault_of_list(tree: Path, fault: Fault) -> str:
    """What keeps *fault* from being planted; empty if nothing does."""
    path = tree / "package" / "agentinfer" / "state" / fault.file
    if not path.is_file():
        return f"there is no state/{fault.file}"
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return f"its text occurs {text.count(fault.old)} times in state/{fault.file}, not once: {fault.old!r}"
    planted = text.replace(fault.old, fault.new)
    if planted == text:
        return "it changes nothing"
    try:
        compile(planted, fault.file, "exec")
    except SyntaxError as error:
        return f"it does not compile: {error}"
    return ""


def try_out(tree: Path, fault: Fault | None, seconds: dict[str, float], limit_s: float) -> Verdict:
    """Run the tests of *tree* against a copy of its package with *fault* in it; None: as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        shutil.copytree(tree / "package" / "agentinfer", folder / "agentinfer")
        if fault is not None:
            path = folder / "agentinfer" / "state" / fault.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        began = time.perf_counter()
        status = _pytest(tree, folder, seconds, limit_s)
        took_s = time.perf_counter() - began
        report = folder / "report.json"
        said = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    return _verdict(fault, status, said, output, took_s)


def _pytest(tree: Path, folder: Path, seconds: dict[str, float], limit_s: float) -> int | None:
    """The exit status of *tree*'s tests with *folder* in front of everything; None: it took more than *limit_s*."""
    told = {
        "package": str(folder / "agentinfer"),
        "report": str(folder / "report.json"),
        "seconds": seconds,
        "patience": PATIENCE_S,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parent))),  # before the installed package
        "PYTHONDONTWRITEBYTECODE": "1",  # and the copy came without any: no stale bytecode
        "HYPOTHESIS_PROFILE": "mutants",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "PLANTED": str(folder / "told.json"),  # a file: an environment variable holds 128 KiB at most
    }
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "planted", *TESTS]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _verdict(
    fault: Fault | None, status: int | None, said: dict[str, Any] | None, output: str, took_s: float
) -> Verdict:
    """Judge a run by its exit status and by what the plugin saw."""
    if status is None:
        return Verdict("timed out", "the whole run", "", took_s, {})
    ended = f"pytest ended with {status}: {output[-1500:]}"
    if said is None:
        return Verdict("broken", "", ended, took_s, {})
    test, seconds = (said["failed"] or [""])[0], said["seconds"]
    module = f"agentinfer.state.{fault.file.removesuffix('.py')}" if fault else "agentinfer.state"
    if said["foreign"]:
        outcome, why = "broken", f"not from the copy: {', '.join(said['foreign'])}"
    elif said["why"].startswith(("NameError", "UnboundLocalError", "ImportError")):
        outcome, why = "broken", f"the planted text itself does not run: {said['why']}"
    elif test:
        outcome, why = ("timed out" if said["stalled"] else "failed"), said["why"]
    elif status != 0 or not seconds or module not in said["imported"]:
        outcome, why = "broken", ended
    else:
        outcome, why = "passed", ""
    return Verdict(outcome, test, why, took_s, seconds)


def judge(
    tree: Path, faults: list[Fault], seconds: dict[str, float], limit_s: float, jobs: int
) -> tuple[list[Fault], int]:
    """Print a line a fault; those that survived, and how many timed out."""
    survivors: list[Fault] = []
    late = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(try_out, tree, fault, seconds, limit_s): fault for fault in faults}
        for done, future in enumerate(as_completed(futures), start=1):
            fault, verdict = futures[future], future.result()
            killed = verdict.outcome in ("failed", "timed out")
            late += verdict.outcome == "timed out"
            if not killed:
                survivors.append(fault)
            head = {"passed": "SURVIVED", "failed": "killed", "timed out": "timed out"}.get(verdict.outcome, "BROKEN")
            by = f"by {verdict.test}" if killed else verdict.why or fault.breaks
            line = f"[{done:2}/{len(faults)}] {head:9} {fault.name} ({fault.kind}) {by} {verdict.took_s:.1f} s"
            print(line, flush=True)
            if killed and verdict.why:
                print(f"        {verdict.why}", flush=True)
    return survivors, late


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Plant faults in the control plane; its tests must find them.")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault alone (can be repeated)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default 2)")
    asked = parser.parse_args()
    unknown = set(asked.only or ()) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is named {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if asked.only is None or fault.name in asked.only]
    if asked.list:
        for fault in faults:
            print(f"{fault.name:30} {fault.kind:40} {fault.breaks}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        take_tree(Path(name))
        return run(Path(name), faults, asked.jobs)


def run(tree: Path, faults: list[Fault], jobs: int) -> int:
    """Try all *faults*, and print what became of them. The exit status."""
    wrong = {fault.name: why for fault in faults if (why := fault_of_list(tree, fault))}
    for name, why in wrong.items():
        print(f"{name} cannot be planted: {why}")
    if wrong:
        print(f"0 passed, {len(wrong)} failed")
        return 1
    began = time.perf_counter()
    print(f"the unmutated tree, {' and '.join(TESTS)}:", flush=True)
    sound = try_out(tree, None, {}, 600.0)
    if sound.outcome != "passed":
        print(f"{sound.outcome} {sound.test} {sound.why}")
        return 2
    print(f"passed, {len(sound.seconds)} tests, {sound.took_s:.1f} s", flush=True)
    survivors, late = judge(tree, faults, sound.seconds, max(120.0, 5 * sound.took_s), jobs)
    if survivors:
        print("\nnot killed:")
    for fault in survivors:
        print(f"  {fault.name} ({fault.kind}): {fault.breaks}")
    took_s = time.perf_counter() - began
    kinds = len({fault.kind for fault in faults})
    print(f"\n{len(faults)} faults of {kinds} kinds in {took_s:.0f} s, {late} of them timed out")
    print(f"{len(faults) - len(survivors)} passed, {len(survivors)} failed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
