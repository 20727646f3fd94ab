"""ARCHITECTURE.md against the package: its map, and its layers."""

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "agentinfer"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def mapped(text: str) -> list[str]:
    """The files and folders that lines begin with: two spaces in the package, four in the folder named before."""
    found, folder = [], ""
    for line in text.splitlines()[1:]:
        inner = line.startswith("    ")
        names = re.match(r"(?:[\w/]+(?:\.py|\.html|/) +)*", line.lstrip())[0].split()
        found += [(folder if inner else "") + name for name in names]
        folder = folder if inner else names[0]
    return found


def test_the_map_names_every_file_once() -> None:
    """Every module has one place in the map, and what the map names exists."""
    counts = Counter(mapped(next(block for block in BLOCKS if block.startswith("src/agentinfer/"))))
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    kernels = Path("ops/kernels")
    missing = [str(path) for path in files if str(path) not in counts and kernels not in path.parents]
    gone = [name for name in counts if not (PACKAGE / name).exists()]
    assert (missing, gone, [name for name, count in counts.items() if count > 1]) == ([], [], [])


def test_the_layers_are_those_that_import_linter_checks() -> None:
    """The layers in words are the contract's, less those that are not there yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    checked = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    rows = [[name.strip(" ()") for name in row.split("|")] for row in checked]
    there = [[name for name in row if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()] for row in rows]
    said = next(block for block in BLOCKS if block.startswith("cli\n"))
    assert [row.split(" | ") for row in said.splitlines()] == there[1:]
