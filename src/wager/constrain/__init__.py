"""Grammars that the output of a request must follow, and tool calls."""
