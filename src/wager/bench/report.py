"""Turns measured answers into rows, a summary, a comparison and the card, which records the conditions.

Rates: `decode_tok_s` is tokens over the seconds between each answer's first and last token, `e2e_tok_s` tokens over
wall seconds, prefill included. Requests that run at once overlap: then the first is the speed of one answer and
the second that of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from wager.bench.machine import describe, versions
from wager.bench.measure import Measurement
from wager.bench.workload import Prompt

Row = dict[str, Any]

SLOWER = 0.95
"""A prompt counts as slower if its decoding speed is below this share of the plain one."""


def card(*, model: str, kernels: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a measurement: model, kernels, machine, settings, versions, date."""
    return {
        "model": model,
        "kernels": dict(kernels),
        "machine": describe().as_dict(),
        "settings": dict(settings),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def rows(prompts: Sequence[Prompt], record: Measurement) -> list[Row]:
    """One row per prompt; times are medians over the passes, the other values are those of the first pass."""
    return [_row(prompt, record, index) for index, prompt in enumerate(prompts)]


def _row(prompt: Prompt, record: Measurement, index: int) -> Row:
    answer = record.answer(index)
    stats = answer.stats
    return {
        "id": prompt.id,
        "category": prompt.family,
        "prompt_tokens": stats.prompt_tokens,
        "tokens": stats.completion_tokens,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafter": stats.drafter,
    }


def summary(rows: Sequence[Row], *, wall_s: float) -> dict[str, Any]:
    """Rates of all rows and of each family; in the families, end to end is per request (prefill + decoding)."""
    families = {family: [row for row in rows if row["category"] == family] for family in _families(rows)}
    per_category = {family: {"prompts": len(group), **_rates(group)} for family, group in families.items()}
    return {**_rates(rows, wall_s=wall_s), "wall_s": wall_s, "per_category": per_category}


def compare(plain: Sequence[Row], fast: Sequence[Row], *, plain_wall_s: float, wall_s: float) -> dict[str, Any]:
    """Speculation against plain decoding on the same prompts; every speed-up is plain seconds over speculative ones.

    `decode_speedup` and `e2e_speedup` are ratios of total seconds (over all prompts, end to end is wall time), the
    `median_*` ones medians of the prompts' own ratios, `slower` counts prompts whose decoding falls below SLOWER,
    `differing` those whose token ids differ.
    """
    pairs = list(zip(plain, fast, strict=True))
    per_category = {
        family: _ratios([pair for pair in pairs if pair[0]["category"] == family]) for family in _families(plain)
    }
    prompts = [
        {
            "id": a["id"],
            "category": a["category"],
            "decode_speedup": _ratio(a["decode_s"], b["decode_s"]),
            "e2e_speedup": _ratio(_seconds(a), _seconds(b)),
            "same": a["token_ids"] == b["token_ids"],
        }
        for a, b in pairs
    ]
    overall = {**_ratios(pairs), "e2e_speedup": _ratio(plain_wall_s, wall_s)}
    return {**overall, "per_category": per_category, "rows": prompts}


def _families(rows: Sequence[Row]) -> list[str]:
    return sorted({row["category"] for row in rows})


def _rates(rows: Sequence[Row], *, wall_s: float | None = None) -> dict[str, Any]:
    tokens, rounds = sum(row["tokens"] for row in rows), sum(row["rounds"] for row in rows)
    seconds = sum(map(_seconds, rows)) if wall_s is None else wall_s
    return {
        "decode_tok_s": _ratio(tokens, sum(row["decode_s"] for row in rows)),
        "e2e_tok_s": _ratio(tokens, seconds),
        "mean_acceptance_length": _ratio(tokens, rounds),
        "tokens": tokens,
    }


def _ratios(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    decode = [r for a, b in pairs if (r := _ratio(a["decode_s"], b["decode_s"])) is not None]
    end_to_end = [r for a, b in pairs if (r := _ratio(_seconds(a), _seconds(b))) is not None]
    return {
        "prompts": len(pairs),
        "decode_speedup": _ratio(sum(a["decode_s"] for a, _ in pairs), sum(b["decode_s"] for _, b in pairs)),
        "e2e_speedup": _ratio(sum(_seconds(a) for a, _ in pairs), sum(_seconds(b) for _, b in pairs)),
        "median_decode_speedup": median(decode) if decode else None,
        "median_e2e_speedup": median(end_to_end) if end_to_end else None,
        "slower": sum(ratio < SLOWER for ratio in decode),
        "differing": sum(a["token_ids"] != b["token_ids"] for a, b in pairs),
    }


def _seconds(row: Row) -> float:
    return float(row["prefill_s"] + row["decode_s"])


def _ratio(numerator: float, denominator: float) -> float | None:
    """None if the denominator is 0: an answer of one token has no decoding time."""
    return numerator / denominator if denominator > 0 else None
