"""What pyproject.toml and constraints.txt promise to each other."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sources

UNPINNED = {"vllm", "flash-attn", "clients"}  # one pins another torch, one is compiled, one is for tests that want it
TESTED = {"torch": ("2.11.0", "2.13.0"), "transformers": ("5.17.0", "5.24.0")}


def project() -> dict[str, Any]:
    return tomllib.loads((sources.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (sources.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    extras = project()["optional-dependencies"]
    pinned = [extras[extra] for extra in extras if extra not in UNPINNED]
    return [Requirement(text) for group in (project()["dependencies"], *pinned) for text in group]


def test_few_dependencies() -> None:
    """At most ten packages are required."""
    assert len(project()["dependencies"]) <= 10


def test_extras() -> None:
    """The extras are those that the documentation names, and none asks for another."""
    extras = project()["optional-dependencies"]
    assert set(extras) == {"vllm", "flash-attn", "clients", "serve", "otel", "structured", "demo", "dev", "docs"}
    assert not [text for group in extras.values() for text in group if text.startswith("agentinfer")]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_pins_satisfy_ranges(requirement: Requirement) -> None:
    """Whatever the package asks for is pinned, at a version that it admits."""
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", TESTED)
def test_ranges_admit_the_supported_versions(name: str) -> None:
    """The oldest and the newest supported versions of torch and transformers are admitted."""
    (requirement,) = (r for r in requirements() if r.name == name)
    assert all(map(requirement.specifier.contains, TESTED[name]))


def test_ignored_lint_rules_have_reasons() -> None:
    """Beside each ignored rule stands why."""
    text = (sources.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ruff = text[text.index("[tool.ruff.lint]") : text.index("[tool.ruff.lint.flake8-tidy-imports")]
    ignores = [line for line in ruff.splitlines() if re.search(r'"[A-Z]+[0-9]*"', line)]
    assert len(ignores) > 20
    assert not [line for line in ignores if not re.search(r"# \S", line) and "select" not in line]
