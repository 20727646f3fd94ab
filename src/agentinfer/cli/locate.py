"""MODEL on the command line: a folder, an id of the Hugging Face hub, or the demo model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentinfer.cli.usage import Usage, complain, line
from agentinfer.errors import AgentInferError

SMALL: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
)
NEEDED: Final = (*SMALL, "model*.safetensors")
"""The files of a repository that are read. Others, other formats of the weights above all, are not fetched."""
_HUB_ID: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def locate(model: str, *, weights: bool = True) -> Path:
    """The folder of *model*, fetched first if need be; without *weights*, from the hub only the small files are.

    Raises Usage saying where it was looked for.
    """
    if model == "demo":
        return demo_folder(quiet=not sys.stderr.isatty())
    if not model:
        raise Usage("MODEL is empty")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise Usage(f"{model}: is a file; a model is a folder with config.json and safetensors files")
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "-")):
        raise Usage(f"{model}: no such folder")
    return from_hub(model, NEEDED if weights else SMALL)


def from_hub(repo_id: str, files: Sequence[str]) -> Path:
    """The snapshot of *repo_id* in the hub's cache, where what is missing of *files* is fetched. Raises Usage."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(cast(Any, huggingface_hub).snapshot_download(repo_id, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise Usage(f"{repo_id}: the model is gated; ask for access on its page, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise Usage(f"{repo_id}: no such folder here, and the hub has no such model (or it is private)") from error
    except LocalEntryNotFoundError as error:
        raise Usage(
            f"{repo_id}: no such folder here, not in the hub's cache, and the hub can not be reached"
        ) from error
    except Exception as error:  # the client lets its transport's errors through
        raise Usage(f"{repo_id}: no such folder here, and the hub did not give it: {line(error)}") from error


def demo_folder(*, quiet: bool) -> Path:
    """The demo model, fetched and converted the first time, with words about it unless *quiet*. Raises Usage."""
    from agentinfer.demo import ensure_demo

    try:
        return ensure_demo(demo_cache(), (lambda _: None) if quiet else complain)
    except AgentInferError as error:
        raise Usage(f"demo: {line(error)}") from error


def demo_cache() -> Path:
    """Where the demo model is kept."""
    from agentinfer.demo import cache_dir

    return cache_dir(os.environ, Path("~").expanduser())
