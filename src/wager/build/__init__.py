"""From a configuration to a running engine: the one place where packages are put together."""
