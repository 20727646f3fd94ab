"""Every fixed size of one engine, with its unit in its name."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from agentinfer.errors import InvalidSetting


def _at_least(least: int) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if type(value) is not int or value < least:
            raise InvalidSetting(attribute.name, f"must be an integer of at least {least}, not {value!r}")

    return check


def _token_ids(instance: Limits, attribute: Attribute[Any], value: Any) -> None:
    for token in value:
        if type(token) is not int or not 0 <= token < instance.vocab_size:
            raise InvalidSetting(attribute.name, f"{token!r} is no token id of a vocabulary of {instance.vocab_size}")


@frozen
class Limits:
    """The sizes that scheduling depends on. Equal limits, policy and events give equal states, everywhere.

    `num_blocks` and `max_num_seqs` count usable ones: the sink block 0 and the sink row 0 come on top.
    Raises InvalidSetting naming the setting.
    """

    block_size: int = field(validator=_at_least(1))
    """Tokens a KV block."""
    num_blocks: int = field(validator=_at_least(1))
    max_num_seqs: int = field(validator=_at_least(1))
    """Sequences that run at once."""
    max_num_batched_tokens: int = field(validator=_at_least(1))
    """Positions that one step may compute: its budget."""
    max_model_len: int = field(validator=_at_least(1))
    """Tokens of the longest sequence, prompt and output together."""
    vocab_size: int = field(validator=_at_least(1))
    eos_ids: tuple[int, ...] = field(default=(), converter=tuple, validator=_token_ids)
    """Token ids that end a sequence unless it asks for `ignore_eos`."""
    prefix_cache: bool = True
    """Find full blocks of earlier sequences by their content."""
    seed: int = field(default=0, validator=_at_least(0))
    """Keys the prefix cache's hashes and the noise of requests that name no seed. 0 is the documented
    deterministic mode: two processes agree. Below 2**63."""
