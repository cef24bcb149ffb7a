"""Losses of a draft law q against the target's law p over the draft vocabulary, one number per row.

kl   forward Kullback-Leibler divergence, sum p log(p / q)
tv   total variation 1 - sum min(p, q): one minus the acceptance of rejection rules
ce   cross-entropy on the target's likeliest token
lk   l KL + (1 - l) TV with l = exp(-3 (1 - TV)), not differentiated (arXiv 2602.23881)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 1 - torch.minimum(log_q.exp(), log_p.exp()).sum(-1)


def _ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)


def _lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    distance = _tv(log_q, log_p)
    share = (-3 * (1 - distance)).exp().detach()
    return share * _kl(log_q, log_p) + (1 - share) * distance


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": _kl, "tv": _tv, "ce": _ce, "lk": _lk}


def divergence(loss: str, logits: Tensor, target_logits: Tensor) -> Tensor:
    """float32 [...] from logits [..., Vd] of the draft and of the target; the latter get no gradient."""
    log_p = target_logits.detach().float().log_softmax(-1)
    return LOSSES[loss](logits.float().log_softmax(-1), log_p)
