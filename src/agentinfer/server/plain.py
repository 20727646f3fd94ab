"""The small endpoints: health, models, version, load, metrics; and those of the administrator."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from agentinfer import __version__
from agentinfer.server.answer import json_response
from agentinfer.server.desk import check_open, drop, look, pause, retry_after_s, silent_s
from agentinfer.server.metrics import exposition, generated_per_s, tokens_per_s
from agentinfer.server.problems import Problem, invalid, unavailable
from agentinfer.server.protocol import read_json
from agentinfer.server.site import Site, bytes_of, in_pool

_RECENT_S = 300


async def health(site: Site, _request: Request) -> Response:
    """200 while the engine advances, or could."""
    check_open(site.desk)
    if site.desk.paused:
        raise unavailable("paused by the administrator", "paused")
    stalled_s = silent_s(site.desk)
    if stalled_s > site.max_stall_s:
        raise unavailable(f"a step has taken {stalled_s:.0f} s, and has not ended", "stalled")
    return json_response({"status": "ok"})


async def models(site: Site, _request: Request) -> Response:
    """The one model, under each of its names."""
    return json_response({"object": "list", "data": [_model(site, name) for name in site.names]})


async def model(site: Site, request: Request) -> Response:
    """The model by one of its names."""
    name = request.path_params["name"]
    if name not in site.names:
        raise Problem(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    return json_response(_model(site, name))


def _model(site: Site, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": site.created,
        "owned_by": "agentinfer",
        "root": site.names[0],
        "parent": None,
        "max_model_len": site.max_model_len,
    }


async def version(_site: Site, _request: Request) -> Response:
    """Which program this is."""
    return json_response({"version": __version__})


async def load(site: Site, _request: Request) -> Response:
    """How busy the server is."""
    desk, metrics = site.desk, site.desk.metrics
    return json_response(
        {
            "server_load": len(desk.tickets),
            "waiting": metrics.num_waiting,
            "running": metrics.num_running,
            "queued_sequences": desk.num_queued,
            "queued_tokens": desk.tokens_queued,
            "free_blocks": metrics.num_free_blocks,
            "num_blocks": metrics.num_blocks,
            "tokens_per_s": round(tokens_per_s(metrics), 1),
            "retry_after_s": retry_after_s(desk),
            "generated_per_s": generated_per_s(metrics, _RECENT_S),
        }
    )


async def metrics(site: Site, _request: Request) -> Response:
    """The numbers, for Prometheus."""
    return Response(exposition(site.desk.metrics, site.names[0]), headers={"content-type": CONTENT_TYPE_LATEST})


# --- the administrator's ---------------------------------------------------------------------------------------------


async def pause_engine(site: Site, _request: Request) -> Response:
    """Step no more. Requests still come in, and wait."""
    pause(site.desk, paused=True)
    return json_response({"status": "paused"})


async def resume_engine(site: Site, _request: Request) -> Response:
    """Go on."""
    pause(site.desk, paused=False)
    return json_response({"status": "running"})


async def abort(site: Site, request: Request) -> Response:
    """End the requests whose answers have the id `request_id`, or all of them."""
    raw = read_json(await bytes_of(site.quotas, request) or b"{}")
    wanted = raw.get("request_id")
    if wanted is not None and not isinstance(wanted, str):
        raise invalid("request_id", "request_id: must be a text")
    chosen = [ticket for ticket in site.desk.tickets.values() if wanted in (None, ticket.name)]
    drop(site.desk, chosen, "by the administrator")
    return json_response({"aborted": [ticket.name for ticket in chosen]})


async def state(site: Site, _request: Request) -> Response:
    """The live state: who waits, who runs, who holds which blocks."""
    seen = await look(site.desk)
    requests = [
        {"id": ticket.name, "prompt_tokens": [len(c.item.prompt) for c in ticket.courses],
         "output_tokens": [c.count for c in ticket.courses]}
        for ticket in site.desk.tickets.values()
    ]  # fmt: skip
    return json_response({**seen.state, "paused": site.desk.paused, "requests": requests})


async def trace(site: Site, _request: Request) -> Response:
    """What `agentinfer replay` can live through again: every event since the start, with the digest after it."""
    if site.trace is None:
        raise Problem(409, "nothing is recorded: start the server with --record FILE", code="not_recorded")
    data = await in_pool(site, site.trace.read_bytes)
    whole = data[: data.rfind(b"\n") + 1]  # the last line may still be on its way
    return Response(whole, media_type="application/jsonl")
