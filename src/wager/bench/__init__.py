"""Workloads, measurements and their reports. An engine is whatever turns requests into completions."""
