"""LangChain and a server of this package: `agentinfer serve demo`, then `python examples/langchain_chat.py`."""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")


def main(model: str) -> int:
    """A question, answered whole and as a stream."""
    chat = ChatOpenAI(
        model=model, base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_tokens=40, temperature=0
    )
    print(chat.invoke("What is 2 + 2?").content)
    for chunk in chat.stream("Name three colours."):
        print(chunk.content, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
