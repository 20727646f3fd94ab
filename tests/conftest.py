"""Profiles of Hypothesis, a fixed seed, one thread, no network. Works where torch is not installed.

HYPOTHESIS_PROFILE chooses `fast` (make test; the default), `ci` (make ci) or `soak` (make soak, after tests/soak.py).
Tests take the number of their examples from the profile. The seed is fixed, except in a soak; it is printed in the
header, and `--hypothesis-seed=N` sets another.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

SEED = 20261130
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # a machine with two busy cores is no fault of a test

# No database in `ci` and `soak`: what they do depends on the seed alone.
settings.register_profile("fast", deadline=None, max_examples=60, stateful_step_count=30, suppress_health_check=_SLOW)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=400,
    stateful_step_count=40,
    database=None,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5_000,
    stateful_step_count=50,
    database=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=_SLOW,
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
settings.load_profile(PROFILE)

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: a test that asks a hub fails at once


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Seed Hypothesis before its plugin looks; the workers of pytest-xdist inherit the option."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(32) if PROFILE == "soak" else SEED)


def pytest_report_header(config: pytest.Config) -> str:
    """The seed, so that a run can be repeated."""
    return f"hypothesis: HYPOTHESIS_PROFILE={PROFILE} --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that hold an address: the workers of pytest-xdist would not agree on them."""
    odd = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if odd:
        raise pytest.UsageError(f"a test's name holds an address, so it differs from process to process: {odd[0]}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """One torch thread, where torch is in use: the cores belong to the workers, and sums keep their order."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
