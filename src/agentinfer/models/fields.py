"""The fields of one JSON object, read strictly: a wrong one is an error that names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from attrs import frozen

from agentinfer.errors import CheckpointError

_LARGEST = 1e20  # what no sane field exceeds; NaN and infinity fail the comparison too


@frozen(eq=False)
class Fields:
    """The fields of one JSON object, and where it stands (for errors)."""

    raw: Mapping[str, Any]
    where: str

    def fault(self, name: str, message: str) -> CheckpointError:
        """The error for the field *name*, to be raised."""
        return CheckpointError(f"{self.where}: {name}: {message}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer of *least* to *most*; *default* stands for a missing or null one, if given."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if name not in self.raw:
            raise self.fault(name, "missing")
        if type(value) is not int or not least <= value <= most:
            raise self.fault(name, f"must be an integer from {least} to {most}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number above *least*."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if name not in self.raw:
            raise self.fault(name, "missing")
        if type(value) not in {int, float} or value is None or not least < value <= _LARGEST:
            raise self.fault(name, f"must be a finite number above {least:g}, not {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean; *default* stands for a missing or null one."""
        value = self.raw.get(name)
        if value is not None and type(value) is not bool:
            raise self.fault(name, f"must be true or false, not {value!r}")
        return default if value is None else value

    def section(self, name: str) -> Fields | None:
        """The object under *name*, None for a missing, null or empty one."""
        value = self.raw.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, f"must be an object, not {value!r}")
        return Fields(cast("dict[str, Any]", value), f"{self.where}: {name}")
