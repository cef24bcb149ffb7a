"""Builds an engine from a configuration; the only package that imports all the others' implementations."""
