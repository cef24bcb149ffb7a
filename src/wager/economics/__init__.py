"""When to speculate and how far: what steps cost (latency), how often guesses are right, what is decided (policy)."""
