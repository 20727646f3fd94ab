"""Every fixed size of one engine, with its unit in its name."""

from __future__ import annotations

from typing import Any, Final, cast

from attrs import Attribute, field, frozen

from agentinfer.errors import InvalidSetting
from agentinfer.state.ids import tupled

MOST: Final = 2**31 - 1
"""Of every size: the columns that hold them are int32."""


def integer(least: int, most: int = MOST, *, optional: bool = False) -> Any:
    """A validator of settings: an integer in [*least*, *most*]; None too if *optional*."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if type(value) is not int or not least <= value <= most:
            raise InvalidSetting(attribute.name, f"must be an integer in [{least}, {most}], not {value!r}")

    return check


def instance(kind: type) -> Any:
    """A validator of settings: an instance of *kind*."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind):
            raise InvalidSetting(attribute.name, f"must be a {kind.__name__}, not {value!r}")

    return check


def _token_ids(instance: Limits, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not tuple:
        raise InvalidSetting(attribute.name, f"must be token ids, not {value!r}")
    for token in cast("tuple[Any, ...]", value):
        if type(token) is not int or not 0 <= token < instance.vocab_size:
            raise InvalidSetting(attribute.name, f"{token!r} is no token id of a vocabulary of {instance.vocab_size}")


@frozen
class Limits:
    """The sizes that scheduling depends on. Equal limits, policy and events give equal states, everywhere.

    `num_blocks` and `max_num_seqs` count usable ones: the sink block 0 and the sink row 0 come on top.
    Raises InvalidSetting naming the setting.
    """

    block_size: int = field(validator=integer(1))
    """Tokens a KV block."""
    num_blocks: int = field(validator=integer(1))
    max_num_seqs: int = field(validator=integer(1))
    """Sequences that run at once."""
    max_num_batched_tokens: int = field(validator=integer(1))
    """Positions that one step may compute: its budget."""
    max_model_len: int = field(validator=integer(1))
    """Tokens of the longest sequence, prompt and output together."""
    vocab_size: int = field(validator=integer(1))
    eos_ids: tuple[int, ...] = field(default=(), converter=tupled, validator=_token_ids)
    """Token ids that end a sequence unless it asks for `ignore_eos`."""
    prefix_cache: bool = field(default=True, validator=instance(bool))
    """Find full blocks of earlier sequences by their content."""
    max_logprobs: int = field(default=20, validator=integer(0))
    """Likeliest tokens that a request may be told of beside each of its own."""
    seed: int = field(default=0, validator=integer(0, 2**63 - 1))
    """Keys the prefix cache's hashes and the noise of requests that name no seed. 0 is the documented
    deterministic mode: two processes agree. Below 2**63."""

    def __attrs_post_init__(self) -> None:
        if (self.max_num_seqs + 1) * self.block_size > MOST + 1:  # places in Columns.tail, the sink's included
            raise InvalidSetting(
                "max_num_seqs", f"{self.max_num_seqs} sequences with blocks of {self.block_size} tokens are too many"
            )
