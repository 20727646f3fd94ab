"""The document at /openapi.json. A fuzzer reads it in tests/clients."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from agentinfer.loop import open_engine
from agentinfer.server.site import Quotas
from serving import Server, options, running, small


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    """One whose answers are short."""
    with running(open_engine(folder, small()), options(quotas=Quotas(max_output_tokens=20))) as one:
        yield one
        one.quiet()


def test_the_document_says_what_is_true(server: Server) -> None:
    """Each path of the document is there, with its method; bodies and errors are what its schemas say."""
    document = server.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            answer = server.get(path) if method == "get" else server.post(path, {"surely": "wrong"})
            assert answer.status_code not in (404, 405), path
            if answer.status_code != 200:
                schema = {"$ref": "#/components/schemas/Error", "components": document["components"]}
                Draft202012Validator(schema).validate(answer.json())
    good = {"prompt": [[1, 2]], "max_tokens": 3, "temperature": 0.5, "stop": "x", "logit_bias": {"5": 1}}
    body = {"$ref": "#/components/schemas/CompletionBody", "components": document["components"]}
    Draft202012Validator(body).validate(good)
    assert server.post("/v1/completions", good).status_code == 200
    with pytest.raises(Exception, match="prompt"):
        Draft202012Validator(body).validate({"max_tokens": 3})
