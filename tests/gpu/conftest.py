"""These tests need a GPU: run them there by name, `pytest tests/gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from gpu_shapes import SHAPES
from tiny import write_tiny


def pytest_configure() -> None:
    """Float32 is float32 here."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """name of SHAPES, dtype -> the folder of such a checkpoint."""
    made: dict[tuple[str, str], Path] = {}

    def folder(shape: str, dtype: str) -> Path:
        if (shape, dtype) not in made:
            config = {
                "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "vocab_size": 1100, "max_position_embeddings": 4096, "num_hidden_layers": 3,
                "eos_token_id": 1099, "tie_word_embeddings": True, "dtype": dtype, **SHAPES[shape],
            }  # fmt: skip
            made[shape, dtype] = write_tiny(tmp_path_factory.mktemp("tiny"), **config)
        return made[shape, dtype]

    return folder


@contextmanager
def _never_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # of the mode itself, that it sees not every wait
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def never_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch raises where it would wait for the device."""
    return _never_waiting
