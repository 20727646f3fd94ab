"""Names for the integers that flow through the engine, so that they cannot be mixed up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NewType, TypeVar, cast

import numpy as np
import numpy.typing as npt

SeqId = NewType("SeqId", int)
"""One sequence. Unique for the engine's life, never reused."""
Row = NewType("Row", int)
"""A place in Columns and in the device's tables. Reused. Row 0 is a sink for padding, never given out."""
BlockId = NewType("BlockId", int)
"""A place in the KV pool. Reused. Block 0 is a sink for padding, never given out."""

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


T = TypeVar("T")


def tupled(value: Iterable[T]) -> tuple[T, ...]:
    """*value* as a tuple. Mappings, bytes, and what is no iterable, come back as they are: a validator refuses them."""
    given: Any = value
    if isinstance(given, Mapping | bytes | bytearray) or not isinstance(given, Iterable):
        return cast(Any, given)
    return tuple(value)


def seal(*arrays: npt.NDArray[Any]) -> None:
    """Make *arrays* read-only, so that a record that holds them is immutable in fact."""
    for array in arrays:
        array.setflags(write=False)


def ints(column: npt.NDArray[Any]) -> list[int]:
    """The column as Python ints: the one place where a column becomes a loop."""
    return column.tolist()


def some(column: Bool) -> bool:
    """Whether any element is true; several times as fast as `column.any()` on short columns."""
    return bool(np.count_nonzero(column))


def every(column: npt.NDArray[Any]) -> bool:
    """Whether all elements are true, or not 0; several times as fast as `column.all()` on short columns."""
    return int(np.count_nonzero(column)) == len(column)


def total(column: npt.NDArray[Any]) -> int:
    """The sum as a Python int; faster than `column.sum()` on short columns."""
    return int(np.add.reduce(column))


def cdiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)
