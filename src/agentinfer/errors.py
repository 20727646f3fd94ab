"""What can go wrong, by name. Knows nothing of the rest of the package."""

from __future__ import annotations


class AgentInferError(Exception):
    """The parent of every error that this package raises on purpose."""


class InvalidRequest(AgentInferError, ValueError):
    """A request that can not be served. `field` names the parameter at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class InvalidSetting(AgentInferError, ValueError):
    """A setting of the engine that can not work. `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CheckpointError(AgentInferError):
    """A model folder that can not be loaded: the message names the file and the key."""


class StaleHandle(AgentInferError, RuntimeError):
    """A KvCache was used after it had been given to a function that writes."""


class GraphBinding(AgentInferError, RuntimeError):
    """A captured graph was replayed against other memory than it was captured over."""
