"""`agentinfer serve`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from agentinfer.cli.opened import opened
from agentinfer.cli.record import open_recorder
from agentinfer.cli.usage import Usage, complain

if TYPE_CHECKING:
    from agentinfer.server.front import Options
    from agentinfer.server.guard import Keys

_NEEDED = ("starlette", "uvicorn", "prometheus_client", "msgspec")
_OTEL = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_OPEN_TO_ALL = ("127.0.0.1", "localhost", "::1")


def run(args: argparse.Namespace) -> int:
    """0 once it was told to end. Raises Usage. If the engine could not go on, the process ends here, with 1."""
    missing = [name for name in _NEEDED if not _there(name)]
    if missing:
        raise Usage(f"serve needs {', '.join(missing)}: pip install 'agentinfer[serve]'")
    if args.otlp_traces_endpoint is not None and not all(map(_there, _OTEL)):
        raise Usage(f"--otlp-traces-endpoint needs {' and '.join(_OTEL)}: pip install 'agentinfer[otel]'")
    from agentinfer.server.run import EngineDead

    logging.basicConfig(level=logging.WARNING, format="agentinfer: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what clients do wrong is no news
    try:
        _serve(args)
    except EngineDead as error:
        complain(error)
        sys.stdout.flush()
        os._exit(1)  # threads of a dead engine, or of a collective that never ends, would abort a tidy exit
    return 0


def _serve(args: argparse.Namespace) -> None:
    """Until told to end. Raises Usage, and EngineDead if the engine could not go on."""
    from agentinfer.server.guard import Keys
    from agentinfer.server.run import bind, serve

    users, admins = _keys(args.api_key, "AGENTINFER_API_KEY"), _keys(args.admin_key, "AGENTINFER_ADMIN_KEY")
    if not users and args.host not in _OPEN_TO_ALL:
        complain(f"--host {args.host} without --api-key: whoever reaches it may use it")
    with ExitStack() as stack:
        with _addressed(args):
            listener = stack.enter_context(bind(args.host, args.port))
        recorder = open_recorder(args.record) if args.record is not None else None
        if recorder is not None:
            stack.callback(recorder.close)
        engine = stack.enter_context(opened(args))
        if recorder is not None:
            recorder.begin(engine.machine.limits, args.policy)
            engine.note = recorder
        host, port = listener.getsockname()[:2]
        options = _options(args, Keys(users, admins))
        with _addressed(args):
            listener.listen()  # who was bound at the same time may be first
        serve(
            engine,
            listener,
            options,
            ready=lambda _end: _say(options.names[0], host, port),
        )


@contextmanager
def _addressed(args: argparse.Namespace) -> Generator[None]:
    """Raises Usage where the block finds that the address can not be had."""
    try:
        yield
    except OSError as error:
        raise Usage(f"--host, --port: {args.host}:{args.port}: {error.strerror or error}") from error


def _options(args: argparse.Namespace, keys: Keys) -> Options:
    from agentinfer.server.front import Options
    from agentinfer.server.site import Quotas

    quotas = Quotas(
        max_body=args.max_body,
        max_output_tokens=args.max_output_tokens,
        max_n=args.max_n,
        max_logprobs=args.max_logprobs,
        max_stop=args.max_stop,
        request_timeout_s=args.request_timeout,
        body_timeout_s=args.body_timeout,
    )
    return Options(
        names=tuple(args.served_model_name) or (args.model,),
        keys=keys,
        quotas=quotas,
        parser=args.parser,
        max_queued=args.max_queued,
        max_queued_tokens=args.max_queued_tokens,
        shutdown_timeout_s=args.shutdown_timeout,
        head_timeout_s=args.header_timeout,
        idle_timeout_s=args.idle_timeout,
        max_stall_s=args.step_timeout,
        ui=not args.no_ui,
        trace=None if args.record is None else str(args.record.absolute()),
        apart=args.http_process,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def _there(module: str) -> bool:
    """Whether *module*, and all that it is in, is installed."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _keys(given: Iterable[str], variable: str) -> tuple[str, ...]:
    """The keys of a flag, and those of a variable of the environment."""
    found = (*given, *os.environ.get(variable, "").split(","))
    return tuple(key.strip() for key in found if key.strip())


def _say(name: str, host: str, port: int) -> None:
    print(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
