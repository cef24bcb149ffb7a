"""The composition root: from a configuration to a running engine."""
