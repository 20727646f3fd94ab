"""Locust and a server of this package, or any with OpenAI's API: 20 clients, each with a request at a time.

    agentinfer serve demo &
    pip install locust
    locust -f examples/locust_load.py --headless --host http://127.0.0.1:8000 -u 20 -r 10 -t 60s

Beside each request Locust counts a "TTFT", the time until its first event. With status 503, the server's "too busy", a
client waits for as long as Retry-After says, and that counts as a failure. Environment: MODEL, MAX_TOKENS, API_KEY.
"""

from __future__ import annotations

import json
import os
import random
import time

from locust import HttpUser, task

MODEL = os.environ.get("MODEL")
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "64"))
KEY = os.environ.get("API_KEY", "none")
WORDS = ("sea", "hill", "lamp", "seven", "green", "quiet", "river", "stone")


class Client(HttpUser):
    """Asks again once it is answered."""

    def on_start(self) -> None:
        """Which model there is, unless MODEL says it."""
        self.client.headers["Authorization"] = f"Bearer {KEY}"
        self.model = MODEL or self.client.get("/v1/models").json()["data"][0]["id"]

    @task(3)
    def completion(self) -> None:
        """A prompt of some words."""
        self._stream("/v1/completions", {"prompt": " ".join(random.choices(WORDS, k=40))})

    @task(1)
    def chat(self) -> None:
        """A question."""
        asked = f"Write about {random.choice(WORDS)}."
        self._stream("/v1/chat/completions", {"messages": [{"role": "user", "content": asked}]})

    def _stream(self, path: str, asked: dict[str, object]) -> None:
        body = {**asked, "model": self.model, "max_tokens": MAX_TOKENS, "stream": True}
        began, first, done = time.perf_counter(), None, False
        with self.client.post(path, json=body, stream=True, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
                time.sleep(float(answer.headers.get("Retry-After", 0)))
                return
            for line in answer.iter_lines(chunk_size=None):  # as they come
                if not line.startswith(b"data: "):
                    continue
                if first is None:
                    first = time.perf_counter() - began
                    self.environment.events.request.fire(
                        request_type="TTFT", name=path, response_time=first * 1e3, response_length=0, exception=None
                    )
                data = line.removeprefix(b"data: ")
                done = data == b"[DONE]"
                if not done and "error" in json.loads(data):
                    answer.failure(data.decode()[:200])
                    return
            answer.request_meta["response_time"] = (time.perf_counter() - began) * 1e3  # until now, not of the head
            if not done:
                answer.failure("the stream ended before [DONE]")
