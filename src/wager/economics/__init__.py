"""When to speculate and how far: what steps cost (costmodel, latency), what is decided (policy), and simulation."""
