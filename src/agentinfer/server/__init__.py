"""The HTTP server: OpenAI's API over one engine. Needs the extra `serve`."""
