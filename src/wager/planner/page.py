"""The files of `wager plan`: the figure alone, or a page with summary, figure, table and notes."""

from __future__ import annotations

import html
from pathlib import Path

from wager.planner.plots import draw
from wager.planner.text import PlanReport
from wager.terminal import console
from wager.terminal.plots import check_suffix, svg, write_figure


def write_plot(report: PlanReport, path: Path) -> None:
    """The plots in one file. UsageError for a suffix other than .png, .svg or .pdf."""
    check_suffix(path)
    write_figure(draw(report), path)


def write_page(report: PlanReport, path: Path) -> None:
    """An HTML page: summary, plots, table, notes."""
    columns, rows = report.table()
    cost = report.query.cost
    title = html.escape(f"{cost.model.name} on {cost.device.name}")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes())
    summary = html.escape("\n".join(report.summary()))
    page = _PAGE.format(title=title, summary=summary, picture=svg(draw(report)), head=head, body=body, notes=notes)
    console.write_text(page, path)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }}
pre {{ white-space: pre-wrap; background: #f6f6f6; padding: .8rem 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }}
svg {{ width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
<pre>{summary}</pre>
{picture}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
{notes}
</body></html>
"""
