"""`agentinfer generate` with a form that the output must have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import toys
from agentinfer.cli import main
from tiny import write_tiny

SCHEMA = {"type": "array", "items": {"enum": [1, 12]}, "minItems": 1, "maxItems": 3}
Call = tuple[int, str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    tokenizer = toys.byte_level()
    place = write_tiny(
        tmp_path_factory.mktemp("model"), vocab_size=300, eos_token_id=tokenizer.token_to_id("<|im_end|>")
    )
    return toys.folder_of(place, tokenizer, toys.CHATML)


def call(capsys: pytest.CaptureFixture[str], model: Path, *argv: object) -> Call:
    """Status, standard output and standard error of `generate` with *argv*."""
    asks = ("--prompt", "ab", "--num-blocks", 64, "--max-tokens", 60, "--temperature", 1, "--seed", 5)
    status = main([str(x) for x in ("generate", model, *asks, *argv)])
    return status, *capsys.readouterr()


def test_outputs_have_the_form_of_the_flag(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    """A schema and a grammar from files, any JSON object, a regular expression, choices."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: N ("+" N)+\nN: /[0-9]{1,2}/')
    status, out, err = call(capsys, model, "--json-schema", schema)
    assert (status, err) == (0, "")
    assert set(json.loads(out)) <= {1, 12}
    assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})+\n", call(capsys, model, "--grammar", grammar)[1])
    assert re.fullmatch("[ab]{3,5}c\n", call(capsys, model, "--regex", "[ab]{3,5}c")[1])
    assert call(capsys, model, "--choice", "yes,no")[1] in ("yes\n", "no\n")
    (result,) = map(json.loads, call(capsys, model, "--json-object", "--max-tokens", 4, "--json")[1].splitlines())
    assert result["text"].lstrip(" \t\r\n")[:1] in ("", "{")


def test_wrong_forms(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    """What the flags get wrong is wrong usage; what the grammar gets wrong refuses the prompt, in one line."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for argv, status, says in (
        (("--regex", "a", "--choice", "b"), 2, "not allowed with argument --regex"),
        (("--json-schema", tmp_path / "none"), 2, r"--json-schema: .*none: No such file"),
        (("--grammar", binary), 2, "--grammar: .*is no UTF-8"),
        (("--choice", "a,,b"), 2, r"structured_outputs\.choice: must hold texts"),
        (("--regex", "a", "--ignore-eos"), 2, "can not be together with structured_outputs"),
        (("--regex", "("), 1, r"structured_outputs\.regex: .*unclosed group"),
    ):
        got, out, err = call(capsys, model, *argv)
        assert (got, out) == (status, "")
        assert re.fullmatch(f"agentinfer: .*{says}.*\n", err), err
