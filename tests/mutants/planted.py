"""A pytest plugin for one run of run.py: quick tests first, nothing shrunk, and a report that the runner reads.

What it is told is in the JSON file that the environment variable PLANTED names: `package`, the folder that must hold
every module of agentinfer that is imported; `report`, the file to write; `seconds`, what each test took on the
unmutated tree (empty: not known yet); `patience`, the least number of seconds that a test may take.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Like `fast` of tests/conftest.py, but a failure is neither shrunk nor kept: all that counts is that there is one.
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=60,
    stateful_step_count=30,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


class Planted:
    """What one run has seen. Mutable: pytest reports to it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.why = ""
        self.began = time.perf_counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests that take least in front."""
        items.sort(key=lambda item: self.told["seconds"].get(item.nodeid, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """End the whole run when a test takes ten times what it should: a fault may loop for ever."""
        most = max(self.told["patience"], 10 * self.told["seconds"].get(item.nodeid, 60.0))

        def stalled(*_: object) -> None:
            self.failed.append(item.nodeid)
            self.why = f"still running after {most:.0f} s"
            self.write(stalled=True)
            os._exit(1)

        before = signal.signal(signal.SIGALRM, stalled)
        signal.setitimer(signal.ITIMER_REAL, most)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took, and how it failed."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        self._failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note that a file of tests could not be imported."""
        self._failure(report)

    def _failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.why = self.why or " ".join(str(crash.message if crash else report.longrepr).split())[:160]

    def pytest_sessionfinish(self) -> None:
        """Say all of it."""
        self.write(stalled=False)

    def write(self, *, stalled: bool) -> None:
        """Leave the report, with the modules of agentinfer that came from elsewhere."""
        package = Path(self.told["package"])
        modules = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "agentinfer"]
        files = {name: module.__file__ for name, module in modules}
        foreign = [name for name, file in files.items() if file is None or not Path(file).is_relative_to(package)]
        report = {
            "failed": self.failed,
            "why": self.why,
            "stalled": stalled,
            "seconds": self.seconds,
            "foreign": foreign,
            "imported": sorted(files),
            "took": time.perf_counter() - self.began,
        }
        Path(self.told["report"]).write_text(json.dumps(report), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run."""
    config.pluginmanager.register(Planted(json.loads(Path(os.environ["PLANTED"]).read_text(encoding="utf-8"))))
