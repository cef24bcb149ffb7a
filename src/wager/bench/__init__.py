"""Workloads, measurements and their reports, for any engine that turns requests into completions."""
