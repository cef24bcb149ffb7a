"""The decisions of every step: which drafter drafts for which sequence, how deep, and what is verified."""
