"""Policies on a simulated server, without a model."""
