"""Trains drafters of a target: its data, the target's states, draft modules, losses, the loop, checkpoints, exports.

The only package that imports torch, which the extra `wager[train]` installs.
"""
