"""From what a person calls a model to its folder: a folder, an id of the Hugging Face hub, or the demo model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentinfer.demo import default_cache, ensure_demo
from agentinfer.errors import AgentInferError

_log = logging.getLogger(__name__)

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


def find_model(
    model: str | Path, *, weights: bool = True, progress: Callable[[str], None] = _log.info, bars: bool = True
) -> Path:
    """The folder of *model*: "demo", an id of the Hugging Face hub, or a folder. What is missing is fetched.

    Without *weights*, from the hub only the small files are. *progress* gets lines about the demo model that say what
    is being done; *bars*: the hub's client shows its own.
    Raises AgentInferError saying where it was looked for.
    """
    name = str(model)
    if name == "demo":
        return find_demo(progress)
    if not name:
        raise AgentInferError("MODEL is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise AgentInferError(f"{name}: is a file; a model is a folder with config.json and safetensors files")
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "-")):
        raise AgentInferError(f"{name}: no such folder")
    return _from_hub(name, NEEDED if weights else SMALL, bars)


def find_demo(progress: Callable[[str], None]) -> Path:
    """The folder of the demo model, fetched and converted the first time. Raises AgentInferError."""
    try:
        return ensure_demo(default_cache(), progress)
    except AgentInferError as error:
        raise AgentInferError(f"demo: {error}") from error


def _from_hub(repo_id: str, files: Sequence[str], bars: bool) -> Path:
    """The snapshot of *repo_id* in the hub's cache, where what is missing of *files* is fetched."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not bars:
        disable_progress_bars()
    here = f"{repo_id}: no such folder here"
    try:
        return Path(cast(Any, huggingface_hub).snapshot_download(repo_id, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise AgentInferError(
            f"{repo_id}: the model is gated; ask for access on its page, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise AgentInferError(f"{here}, and the hub has no such model (or it is private)") from error
    except LocalEntryNotFoundError as error:
        raise AgentInferError(f"{here}, not in the hub's cache, and the hub can not be reached") from error
    except Exception as error:  # the client lets its transport's errors through
        why = " ".join(str(error).split()) or type(error).__name__
        raise AgentInferError(f"{here}, and the hub did not give it: {why}") from error
