"""The rules that no linter knows: donation, frozen records, no hidden state, sizes, docstrings."""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import re
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import sources

COMMANDS = ("cli", "demo")  # what a person starts may read the environment
MOST_LINES_A_FUNCTION = 70
MOST_LINES_A_FILE = 450
ARRAY = re.compile(r"\b(I32|I64|F32|Bool|NDArray|ndarray|Tensor)\b")
SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z]|$)")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def own_classes(name: str) -> list[type]:
    return [x for x in vars(module(name)).values() if inspect.isclass(x) and x.__module__ == name]


def parts(hint: Any) -> set[Any]:
    """All that a result of this type can contain: members of tuples and unions, without annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        return parts(typing.get_args(hint)[0])
    inner = [x for x in typing.get_args(hint) if x is not Ellipsis]
    return {hint}.union(*(parts(x) for x in inner)) if inner else {hint}


def donated(hint: Any) -> Any | None:
    """X, if *hint* is Donated[X]."""
    if typing.get_origin(hint) is typing.Annotated and "donated" in hint.__metadata__:
        return typing.get_args(hint)[0]
    return None


def callables(where: str, hint: Any) -> list[tuple[str, list[Any], Any]]:
    """(where, types of the arguments, type of the result) of every Callable type in *hint*."""
    inner = [found for x in typing.get_args(hint) if not isinstance(x, list) for found in callables(where, x)]
    if typing.get_origin(hint) is collections.abc.Callable and typing.get_args(hint):
        arguments, result = typing.get_args(hint)
        if isinstance(arguments, list):
            return [(where, arguments, result), *inner]
    return inner


def signature(where: str, f: Any) -> list[tuple[str, list[Any], Any]]:
    """The same of a function, if its annotations name Donated, and of the Callable types among its arguments."""
    if "Donated" not in str(inspect.get_annotations(f)):
        return []
    hints = typing.get_type_hints(f, include_extras=True)
    result = hints.pop("return", None)
    inner = [found for hint in hints.values() for found in callables(where, hint)]
    return [(where, list(hints.values()), result), *inner]


def signatures(name: str) -> list[tuple[str, list[Any], Any]]:
    """The same of everything in a module: functions, methods, names of types, fields of records."""
    found: list[tuple[str, list[Any], Any]] = []
    for key, value in vars(module(name)).items():
        if inspect.isfunction(value) and value.__module__ == name:
            found += signature(f"{name}.{key}", value)
        elif not inspect.isclass(value) and not key.startswith("__"):
            found += callables(f"{name}.{key}", value)
    for owner in own_classes(name):
        where = f"{name}.{owner.__name__}"
        if "Donated" in str(inspect.get_annotations(owner)):
            for hint in typing.get_type_hints(owner, include_extras=True).values():
                found += callables(where, hint)
        for f in vars(owner).values():
            if inspect.isfunction(f) and f.__module__ == name:
                found += signature(f"{where}.{f.__name__}", f)
    return found


def test_donation() -> None:
    """Whatever takes a Donated[X] returns an X."""
    modules = re.compile(r"agentinfer\.(ops|models|steps|graphs|build|loop)\b")
    givers: list[str] = []
    for name in filter(modules.match, sources.MODULES):
        for where, arguments, result in signatures(name):
            for given in filter(None, map(donated, arguments)):
                givers.append(where)
                assert given in parts(result), f"{where} takes a Donated {given}, but returns {result}"
    assert {"agentinfer.ops.kv.copy_blocks", "agentinfer.steps.launch", "agentinfer.steps.decode_step"} <= set(givers)


@pytest.mark.parametrize("name", sources.MODULES)
def test_records_are_frozen(name: str) -> None:
    """A class of attrs is frozen, and any other class says in its docstring what of it is mutable."""
    for cls in own_classes(name):
        where = f"{name}.{cls.__name__}"
        # attrs makes two classes of one with slots; the docstring is on both.
        words = (cls.__doc__ or "").lower()
        if attrs.has(cls):
            frozen = cls.__setattr__ is not object.__setattr__ and "frozen" in cls.__setattr__.__name__
            assert frozen or "mutable" in words, f"{where} is no frozen record, and does not say that it is mutable"
            bases = [base.__name__ for base in cls.__mro__[1:] if attrs.has(base)]
            assert not bases, f"{where} inherits from the records {bases}"
        elif not getattr(cls, "_is_protocol", False) and not issubclass(cls, BaseException | tuple):
            stateless = vars(cls).get("__slots__") == ()
            assert stateless or "mutable" in words, f"{where} is no record; its docstring must say what is mutable"


@pytest.mark.parametrize("name", sources.MODULES)
def test_records_that_hold_arrays_are_compared_by_identity(name: str) -> None:
    """A record with an array or a tensor in it has eq=False, since comparing those gives no bool."""
    for cls in filter(attrs.has, own_classes(name)):
        if any(
            ARRAY.search(str(hint)) for hint in inspect.get_annotations(cls).values() if "Callable" not in str(hint)
        ):
            assert cls.__eq__ is object.__eq__, f"{name}.{cls.__name__} holds an array; it needs eq=False"


@pytest.mark.parametrize("name", sources.MODULES)
def test_no_mutable_globals(name: str) -> None:
    """No module and no class keeps a list, dict, set, array that can be written, or tensor."""
    kept = {f"{name}.{key}": value for key, value in vars(module(name)).items()}
    for cls in own_classes(name):
        kept |= {f"{name}.{cls.__name__}.{key}": value for key, value in vars(cls).items()}
    for where, value in kept.items():
        if where.rpartition(".")[2].startswith("__") or where.endswith("._field_defaults"):  # of a NamedTuple
            continue
        mutable = isinstance(value, list | dict | set | bytearray | torch.Tensor)
        mutable |= isinstance(value, np.ndarray) and value.flags.writeable
        assert not mutable, f"{where} is a mutable {type(value).__name__}"


@pytest.mark.parametrize("path", sources.FILES, ids=sources.module_name)
def test_no_global_statement(path: Path) -> None:
    """No function declares a name global."""
    found = [sources.place(path, node) for node in ast.walk(sources.tree(path)) if isinstance(node, ast.Global)]
    assert not found


@pytest.mark.parametrize("path", sources.FILES, ids=sources.module_name)
def test_hidden_inputs(path: Path) -> None:
    """ops/comm.py alone knows torch.distributed, commands alone the environment, and nobody torch.manual_seed."""
    name = sources.module_name(path)
    banned = ["torch.manual_seed", "torch.cuda.manual_seed"]
    if name != "agentinfer.ops.comm":
        banned.append("torch.distributed")
    if name.split(".")[1:2] not in ([command] for command in COMMANDS):
        banned += ["os.environ", "os.getenv", "os.putenv"]
    found = [
        sources.place(path, node, used)
        for used, node in sources.names_used(path)
        if any(used == name or used.startswith(name + ".") for name in banned)
    ]
    assert not found


def test_module_names() -> None:
    """No module is named for being used by others."""
    vague = {"utils", "util", "common", "base", "manager", "helpers", "misc"}
    assert not [name for name in sources.MODULES if vague & set(name.split("."))]


@pytest.mark.parametrize("path", sources.FILES, ids=sources.module_name)
def test_sizes(path: Path) -> None:
    """A file has at most 450 lines, and a function at most 70."""
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MOST_LINES_A_FILE
    long = [
        sources.place(path, f, f"{f.name}: {f.end_lineno - f.lineno + 1} lines")
        for f in sources.functions(path)
        if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > MOST_LINES_A_FUNCTION
    ]
    assert not long


@pytest.mark.parametrize("path", sources.FILES, ids=sources.module_name)
def test_docstrings(path: Path) -> None:
    """Every module, public class and public function says what it is for."""
    tree = sources.tree(path)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    bare = [sources.place(path, node, node.name) for node in sources.public(tree.body) if not ast.get_docstring(node)]
    assert not bare


@pytest.mark.parametrize("path", sources.TEST_FILES, ids=str)
def test_every_test_says_what_must_hold(path: Path) -> None:
    """Every test has a docstring of one sentence."""
    wrong = []
    for test in sources.functions(path):
        if test.name.startswith("test_"):
            words = " ".join((ast.get_docstring(test) or "").split())
            if len(SENTENCE_END.findall(words)) != 1 or not words.endswith((".", "!", "?")):
                wrong.append(sources.place(path, test, f"{test.name}: {words!r}"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path", [path for path in sources.TEST_FILES if not {"gpu", "clients"} & {*path.parts}], ids=str
)
def test_nothing_is_skipped(path: Path) -> None:
    """No test is skipped, or expected to fail, but for those of devices and packages that `make` does not install."""
    quiet = (
        "pytest.skip",
        "pytest.xfail",
        "pytest.importorskip",
        "pytest.mark.skip",
        "pytest.mark.skipif",
        "pytest.mark.xfail",
    )
    found = [sources.place(path, node, name) for name, node in sources.names_used(path) if name in quiet]
    assert not found
