"""Chat templates: reading them from a model folder, and rendering messages with them.

Knows jinja2 (imported when a template is there) and what chat messages look like. Must not know tokenizers. A template
is untrusted code of the checkpoint: it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import frozen

from agentinfer.errors import CheckpointError, InvalidRequest
from agentinfer.models.folder import member

if TYPE_CHECKING:
    from jinja2 import Environment, Template

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


@frozen(eq=False)
class ChatTemplates:
    """The chat templates of a checkpoint by name: "default", and "tool_use" where it has one. None: it can not chat."""

    sources: Mapping[str, str]
    compiled: Mapping[str, Template]


def read_templates(folder: Path, config: Mapping[str, Any], where: Path) -> ChatTemplates:
    """The templates in *folder* and in *config*, which is the content of the file *where*.

    Raises CheckpointError naming the file: not readable, no template, a link that leaves the folder.
    """
    found = _template_sources(folder, config, where)
    sources = {name: source for name, (source, _) in found.items()}
    return ChatTemplates(MappingProxyType(sources), MappingProxyType(_compile(found)))


def render(
    templates: ChatTemplates,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation. *variables* reach the template: names of special tokens, switches of the model.

    A message is `{"role": ..., "content": ...}`; content is a text or a list of `{"type": "text", "text": ...}` (joined
    by newlines); it may be missing only where an assistant calls tools. Raises InvalidRequest (field `messages`): no
    template, a bad message, an error that the template raises (its own words).
    """
    if not templates.compiled:
        raise InvalidRequest("messages", "the model has no chat template; give a prompt instead")
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:  # pyright: ignore[reportUnnecessaryIsInstance] - from outside
        raise InvalidRequest("messages", f"must be a list of at least one message, not {messages!r}")
    template = templates.compiled.get("tool_use" if tools else "default") or templates.compiled.get("default")
    if template is None:
        raise InvalidRequest(
            "messages", f"the model has no default chat template, only {', '.join(templates.compiled)}"
        )
    known = [_message(i, m) for i, m in enumerate(messages)]
    extra = {"tools": list(tools) if tools else None, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        return template.render({**extra, **variables, "messages": known})
    except Exception as e:  # a template is a program: it can fail in any way
        said = " ".join(f"{type(e).__name__}: {e}".split())
        raise InvalidRequest("messages", f"the chat template refuses them: {said}") from e


def _template_sources(folder: Path, config: Mapping[str, Any], where: Path) -> dict[str, tuple[str, Path]]:
    """Template text and the file that it is from, by name. Files of their own overrule tokenizer_config.json."""
    found: dict[str, tuple[str, Path]] = {}
    said = config.get("chat_template")
    for entry in cast("list[Any]", said if isinstance(said, list) else [{"name": "default", "template": said}]):
        match entry:
            case {"name": str(name), "template": str(source)}:
                found[name] = (source, where)
            case {"name": "default", "template": None}:
                pass
            case _:
                raise CheckpointError(f"{where}: chat_template: must be a text or a list of names and templates")
    more = folder / "additional_chat_templates"
    files = (
        [(more, p.name, p.stem) for p in sorted(more.glob("*.jinja"))]
        if more.is_dir() and not more.is_symlink()
        else []
    )
    for home, name, key in [*files, (folder, "chat_template.jinja", "default")]:
        path = member(home, name)
        if path is not None:
            try:
                found[key] = (path.read_text("utf-8"), path)
            except (OSError, UnicodeDecodeError) as e:
                raise CheckpointError(f"{path}: can not be read: {e}") from e
    return found


def _compile(sources: Mapping[str, tuple[str, Path]]) -> dict[str, Template]:
    if not sources:
        return {}
    from jinja2 import TemplateSyntaxError

    environment = _environment()
    compiled: dict[str, Template] = {}
    for name, (source, path) in sources.items():
        try:
            compiled[name] = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise CheckpointError(f"{path}: chat template {name!r}, line {e.lineno}: {e.message}") from e
    return compiled


def _environment() -> Environment:
    """A sandbox with what templates expect. **Source**: transformers, "Writing a chat template"."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks what to train on; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(x: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    def now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    cast("dict[str, Any]", environment.globals).update(raise_exception=refuse, strftime_now=now)
    return environment


def _message(index: int, message: object) -> dict[str, Any]:
    """*message* checked, its parts joined, and without fields that are None. Raises InvalidRequest."""

    def bad(why: str) -> InvalidRequest:
        return InvalidRequest("messages", f"message {index}: {why}")

    if not isinstance(message, Mapping):
        raise bad(f"must be an object with role and content, not {message!r}")
    known = {str(k): v for k, v in cast("Mapping[Any, Any]", message).items() if v is not None}
    role, content = known.get("role"), known.get("content")
    if role not in ROLES:
        raise bad(f"role {role!r} is none of {', '.join(ROLES)}")
    if content is None:
        if role != "assistant" or not known.get("tool_calls"):
            raise bad("has no content; only an assistant's tool calls may be without")
        return known
    if isinstance(content, str):
        return known
    if not isinstance(content, Sequence):
        raise bad(f"content must be a text or a list of text parts, not {content!r}")
    texts: list[str] = []
    for part in cast("Sequence[Any]", content):
        match part:
            case {"type": "text", "text": str(words)}:
                texts.append(words)
            case {"type": str(kind)} if kind != "text":
                raise bad(f"a part of type {kind!r}: only text is supported")
            case _:
                raise bad(f"a part must be {{'type': 'text', 'text': ...}}, not {part!r}")
    return known | {"content": "\n".join(texts)}
