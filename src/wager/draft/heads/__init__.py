"""Drafters that read the target's states."""
