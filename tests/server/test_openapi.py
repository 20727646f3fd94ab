"""The document at /openapi.json, and a fuzzer that reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from agentinfer.loop import open_engine
from agentinfer.server.site import Quotas
from serving import Server, options, running, small, write_talker

FUZZER = shutil.which("schemathesis")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """One that all of these tests ask."""
    engine = open_engine(write_talker(tmp_path_factory.mktemp("talker")), small())
    with running(engine, options(quotas=Quotas(max_output_tokens=20))) as one:
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


@pytest.mark.slow
@pytest.mark.skipif(FUZZER is None, reason="needs schemathesis")
def test_no_body_is_an_internal_error(server: Server, tmp_path: Path) -> None:
    """schemathesis finds no body that is a 500, an answer of another shape, or a status that is not documented."""
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
    assert FUZZER is not None
    done = subprocess.run(
        [FUZZER, "run", f"{server.url}/openapi.json", "-n", "40", "--checks", checks, "--seed", "1"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads(server.get("/health").text) == {"status": "ok"}
