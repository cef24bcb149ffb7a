"""The server: OpenAI's API, metrics and a dashboard over one engine."""
