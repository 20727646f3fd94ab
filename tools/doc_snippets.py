"""Execute the Python of the documentation: doc_snippets.py FILE_OR_FOLDER ...

Every ```python block of a Markdown file runs, the blocks of one file in one namespace. A block right after the
comment `<!-- no-run: reason -->` is only compiled. One after `<!-- source: module.function -->` must be the text of
that function, less its docstring. Each file runs in an empty folder of its own.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import tempfile
import textwrap
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ \t]*$", re.MULTILINE | re.DOTALL
)
NO_RUN = re.compile(r"<!-- no-run: \S[^\n]* -->\s*\Z")
SOURCE = re.compile(r"<!-- source: (?P<name>[\w.]+) -->\s*\Z")


class Block(NamedTuple):
    """A piece of Python in a file."""

    line: int
    source: str
    runs: bool
    shows: str | None
    """The function whose text it is."""


def blocks(text: str) -> list[Block]:
    """The Python blocks of a Markdown *text*, in order."""
    found: list[Block] = []
    for match in FENCE.finditer(text):
        if match["language"] != "python":
            continue
        line = text.count("\n", 0, match.start("body"))
        indent = len(match["indent"])
        body = "\n".join(row[indent:] for row in match["body"].split("\n"))
        before = text[: match.start()]
        shown = SOURCE.search(before)
        runs = shown is None and NO_RUN.search(before) is None
        found.append(Block(line, body, runs, shown and shown["name"]))
    return found


def text_of(name: str) -> str:
    """The source of the function *name*, less its docstring."""
    module, _, function = name.rpartition(".")
    source = textwrap.dedent(inspect.getsource(getattr(import_module(module), function)))
    first = ast.parse(source).body[0].body[0]
    lines = source.splitlines(keepends=True)
    return "".join(lines[: first.lineno - 1] + lines[first.end_lineno :])


def check(path: Path) -> tuple[int, int]:
    """Run the blocks of *path*: how many there are, and how many failed. After a failure the rest is only compiled."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found, failed = blocks(path.read_text(encoding="utf-8")), 0
    for block in found:
        try:
            # The padding makes tracebacks name the line in the Markdown file.
            code = compile("\n" * block.line + block.source, str(path), "exec")
            if block.shows is not None:
                assert block.source.strip() == text_of(block.shows).strip(), f"not the text of {block.shows}"  # noqa: S101 - reported below
            if block.runs and not failed:
                exec(code, namespace)
        except (Exception, SystemExit):
            failed += 1
            traceback.print_exc()
            print(f"{path}:{block.line + 1}: the block that starts here failed", file=sys.stderr)
    return len(found), failed


def main(arguments: list[str]) -> int:
    """Check the files named, and the Markdown files of folders named. 1 if any block failed, 2 if a file is missing."""
    files: list[Path] = []
    for argument in map(Path, arguments):
        if not argument.exists():
            print(f"{argument}: no such file or folder", file=sys.stderr)
            return 2
        files.extend(sorted(argument.rglob("*.md")) if argument.is_dir() else [argument])
    files = [path.resolve() for path in files]
    total = failures = 0
    for path in files:
        with tempfile.TemporaryDirectory() as folder:
            home = Path.cwd()
            os.chdir(folder)
            try:
                count, failed = check(path)
            finally:
                os.chdir(home)
        total, failures = total + count, failures + failed
    print(f"snippets: {total - failures} passed, {failures} failed, in {len(files)} files")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
