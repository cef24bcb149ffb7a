"""The tables of measured drafters, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wager.bench.drafter_figures import DrafterFigures, RowPrices, by_family, static_optimum
from wager.bench.drafter_runs import PLAIN, DrafterCurve, DrafterRuns, Turn

_NONE = "–"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a drafter shall reach at a temperature: a speed-up over all prompts, one in every family, a tau."""

    drafter: str
    temperature: float
    speedup: float
    family: float | None = None
    tau: float | None = None


def tables(runs: DrafterRuns, *, goals: Sequence[Goal] = ()) -> str:
    """All tables, one temperature after the other."""
    temperatures = sorted({turn.temperature for turn in runs.turns})
    return "\n\n".join("\n\n".join(_of_temperature(runs, each, goals)) for each in temperatures) + "\n"


def _of_temperature(runs: DrafterRuns, temperature: float, goals: Sequence[Goal]) -> Iterator[str]:
    turns = [turn for turn in runs.turns if turn.temperature == temperature]
    names = [name for name in runs.drafters if any(name in turn.answers for turn in turns)]
    prices = RowPrices.of(turns)
    curves = {name: curve for name in names if (curve := runs.curve(temperature, name))}
    tokens = sum(turn.answers[PLAIN].tokens for turn in turns)
    sampled = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    yield f"### Weights `{runs.card['settings']['dtype']}`, {sampled}"
    yield f"{len(turns)} turns, {tokens} plain tokens. {_prices_in_words(prices)}"
    yield _speed_table(turns, names, curves, prices)
    yield from _goal_lines(turns, [goal for goal in goals if goal.temperature == temperature])
    yield "τ by family:"
    yield _family_table(turns, names)
    if curves:
        yield _curves_in_words(list(curves.values()))
        yield _curve_table(curves)


def _prices_in_words(prices: RowPrices) -> str:
    known = [
        f"{rows} rows {price:.2f}" for rows, price in zip(prices.rows, prices.prices, strict=True) if 1 < rows <= 16
    ]
    return f"A step of several rows, in plain steps: {', '.join(known)}." if known else "No step had several rows."


def _speed_table(
    turns: Sequence[Turn], names: Sequence[str], curves: Mapping[str, DrafterCurve], prices: RowPrices
) -> str:
    """tau, cost and speed-ups, those of each family too."""
    families = sorted({turn.family for turn in turns})
    costs = ["drafting a round", "1 guess", "most guesses"]
    columns = ["drafter", "prompts", "τ", *costs, "allowed", "speed-up", *families, "changed"]
    rows = []
    for name in names:
        figures = DrafterFigures.of(turns, name)
        if figures is None:
            continue
        own, curve = by_family(turns, name), curves.get(name)
        rows.append(
            [
                f"`{name}`",
                str(figures.prompts),
                f"{figures.tau:.2f}",
                f"{figures.draft_share:.1%}",
                *_draft_costs(curve),
                _allowed(curve, prices),
                f"**{figures.speedup:.2f}**",
                *(f"{own[family].speedup:.2f}" if family in own else _NONE for family in families),
                str(figures.changed),
            ]
        )
    return _markdown(columns, rows)


def _draft_costs(curve: DrafterCurve | None) -> list[str]:
    if curve is None:
        return [_NONE, _NONE]
    shares = [seconds / curve.step_s for seconds in curve.draft_s]
    return [f"{shares[0]:.1%}", f"{shares[-1]:.1%} ({len(shares)})"]


def _allowed(curve: DrafterCurve | None, prices: RowPrices) -> str:
    """The static optimum, and its guesses."""
    if curve is None:
        return _NONE
    optimum = static_optimum(curve, prices)
    return f"{optimum.speedup:.2f} ({optimum.guesses})"


def _goal_lines(turns: Sequence[Turn], goals: Sequence[Goal]) -> Iterator[str]:
    """Whether each goal is reached, a line each."""
    lines = []
    for goal in goals:
        figures = DrafterFigures.of(turns, goal.drafter)
        if figures is None:
            continue
        lines.append(_goal_line(f"`{goal.drafter}`: speed-up", figures.speedup, goal.speedup))
        if goal.family is not None:
            families = by_family(turns, goal.drafter)
            least = min(families, key=lambda family: families[family].speedup)
            lines.append(
                _goal_line(f"`{goal.drafter}`: least of a family ({least})", families[least].speedup, goal.family)
            )
        if goal.tau is not None:
            lines.append(_goal_line(f"`{goal.drafter}`: τ", figures.tau, goal.tau))
    if lines:
        yield "\n".join(lines)


def _goal_line(what: str, value: float, goal: float) -> str:
    return f"- Goal, {what} at least {goal:.2f}: {value:.2f}, {'reached' if value >= goal else 'missed'}."


def _family_table(turns: Sequence[Turn], names: Sequence[str]) -> str:
    families = sorted({turn.family for turn in turns})
    rows = []
    for name in names:
        own = by_family(turns, name)
        rows.append([f"`{name}`", *(f"{own[family].tau:.2f}" if family in own else _NONE for family in families)])
    return _markdown(["drafter", *families], rows)


def _curves_in_words(curves: Sequence[DrafterCurve]) -> str:
    deepest = max(len(curve.survival) for curve in curves)
    prompts = sorted({curve.prompts for curve in curves})
    counts = " or ".join(map(str, prompts))
    return (
        f"Survival by depth in rounds of {deepest} guesses (of trees: nodes) that are all verified, whatever the "
        f"policy would admit, and τ of fixed numbers of guesses; {counts} of the prompts:"
    )


def _curve_table(curves: Mapping[str, DrafterCurve]) -> str:
    deepest = max(len(curve.survival) for curve in curves.values())
    taus = sorted({1, min(3, deepest), deepest})
    columns = ["drafter", *(f"S_{depth}" for depth in range(1, deepest + 1)), *(f"τ of {guesses}" for guesses in taus)]
    rows = []
    for name, curve in curves.items():
        survival = [f"{value:.3f}" for value in curve.survival]
        survival += [_NONE] * (deepest - len(survival))
        tau = [f"{curve.rounds[guesses - 1].tau:.2f}" if guesses <= len(curve.rounds) else _NONE for guesses in taus]
        rows.append([f"`{name}`" + (" (tree)" if curve.trees else ""), *survival, *tau])
    return _markdown(columns, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
