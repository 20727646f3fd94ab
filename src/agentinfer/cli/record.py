"""Recording a run: a header, then a JSON line an event with the digest of the state after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from attrs import define

from agentinfer.cli.usage import Broken, Usage
from agentinfer.state.engine import EngineState, digest
from agentinfer.state.event import Event
from agentinfer.state.limits import Limits
from agentinfer.state.trace import encode_event, encode_header


@define(eq=False)
class Recorder:
    """Mutable: told of each event, it writes it down. Each line is on its way to the disk before the engine goes on."""

    path: Path
    file: IO[str]
    recording: bool = True

    def __call__(self, event: Event, state: EngineState) -> None:
        """Write one line. Raises Broken if it can not."""
        self._write({**encode_event(event), "digest": digest(state)})

    def begin(self, limits: Limits, policy: str) -> None:
        """Write the header."""
        self._write(encode_header(limits, policy))

    def stop(self) -> None:
        """Write nothing from now on: what has been written is a whole trace of what came before."""
        self.recording = False

    def close(self) -> None:
        """Stop, and close the file. Raises Broken if the last line can not be written, and nobody was told before."""
        told = not self.recording
        self.stop()
        try:
            self.file.close()
        except OSError as error:
            if not told:
                raise Broken(f"--record: {self.path}: {error.strerror or error}") from error

    def _write(self, data: dict[str, Any]) -> None:
        if not self.recording:
            return
        try:
            self.file.write(json.dumps(data) + "\n")
        except OSError as error:
            self.stop()
            raise Broken(f"--record: {self.path}: {error.strerror or error}") from error


def open_recorder(path: Path) -> Recorder:
    """A recorder that writes a new file *path*, replacing an old one. Raises Usage if it can not be opened."""
    try:
        return Recorder(path, path.open("w", encoding="utf-8", buffering=1))
    except OSError as error:
        raise Usage(f"--record: {path}: {error.strerror or error}") from error
