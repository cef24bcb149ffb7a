"""Drafters: ways to guess the next tokens. `base` has the interface, `registry` the names, one file each drafter."""
