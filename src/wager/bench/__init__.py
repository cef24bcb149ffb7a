"""Workloads, measurements and their reports. Knows an engine only by what it does: requests in, completions out."""
