"""The decisions of every step: which drafter drafts for which sequence, how deep, and what is verified.

`base` is the interface of a policy. `adaptive` is the one that weighs costs, with a chapter for each of its questions:
`state` (what it keeps), `prices`, `exploration`, `learning`, `explain`. `heuristics` asks for no prices.
"""
