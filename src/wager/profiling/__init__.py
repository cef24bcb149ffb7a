"""Times real steps and drafts of an engine, to fit latency models."""
