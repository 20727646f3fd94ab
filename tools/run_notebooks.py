"""Execute notebooks from top to bottom, each in a fresh kernel: run_notebooks.py FOLDER. The files are not changed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SECONDS_A_CELL = 300


def execute(path: Path) -> str | None:
    """Run the notebook at *path* in its own folder; what went wrong, if anything did."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error)
    return None


def main(arguments: list[str]) -> int:
    """Execute every notebook of the folder. 1 if any fails, 2 if there is none."""
    (folder,) = arguments
    paths = sorted(Path(folder).rglob("*.ipynb"))
    if not paths:
        print(f"{folder}: no notebooks", file=sys.stderr)
        return 2
    failed = 0
    for path in paths:
        began = time.monotonic()
        problem = execute(path)
        print(f"{path}: {'ok' if problem is None else 'FAILED'} in {time.monotonic() - began:.1f} s")
        if problem is not None:
            failed += 1
            print(problem, file=sys.stderr)
    print(f"notebooks: {len(paths) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
