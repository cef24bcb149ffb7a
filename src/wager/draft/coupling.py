"""Guesses that follow the noise of a request, for drafters that know a little of the target's distribution.

Under `match` the target's token is argmax(log p + g), g the noise field (kernels/noise.py). With q = p the guess
argmax(log q + g) is always right; the nearer q is to p, the oftener it is (Daliri et al. 2024, arXiv 2408.07978). What
a drafter has seen gives every candidate w a mass m(w), which is far from p: then g counts less, since without any g the
guess is the most frequent token. The probability that w is the target's token, given the noise and temperature T, is
taken to be

    m(w)^a exp(b T g(w)) / (exp(a (T^2 - c)) + sum over candidates v of m(v)^a exp(b T g(v)))

where the first summand of the denominator is of what is no candidate. The guess is the likeliest token, and its
probability, multiplied along the path, the survival. Other parameters of a request (filters, penalties, grammars) are
left out: they make a guess less likely right, at most.

The constants were fitted to half of 240 answers of SmolLM2-135M-Instruct at temperatures 0.5, 0.8 and 1. They are not
fitted anew for every sequence: that gained nothing. Native: csrc/coupling.h.
"""

from __future__ import annotations

SHARPNESS = 1.5
"""a: how much log-odds of masses are worth."""

NOISE = 0.7
"""b: how much the noise counts, at temperature 1."""

SETTLED = 0.6
"""c: the square of the temperature at which everything else is worth a mass of 1."""

UNSEEN = 0.05
"""Mass of every candidate, beside what was seen of it."""

COUPLING = SHARPNESS, NOISE, SETTLED, UNSEEN
"""As the native tables take them."""
