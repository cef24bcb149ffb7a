"""Decides, at every step, who drafts for which sequence, how deep, and which guesses are verified."""
