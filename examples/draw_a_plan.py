"""The picture of a plan: the speed-up by batch, a panel for each context and a line for each acceptance.

    wager plan --model Llama-3.1-8B --hardware H100 --context 4k,32k --acceptance 0.6,0.8 --json plan.json
    python examples/draw_a_plan.py plan.json plan.svg

It needs matplotlib. The JSON has more to draw: the parts of a step, memory, every depth (docs/economics.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def main() -> None:
    source, picture = sys.argv[1:]
    plan: dict[str, Any] = json.loads(Path(source).read_text())
    points = plan["points"]
    contexts, acceptances = ([*dict.fromkeys(point[name] for point in points)] for name in ("context", "acceptance"))
    figure = Figure(figsize=(6 * len(contexts), 4.5), layout="constrained")
    figure.suptitle(f"{plan['model']['name']} on {plan['hardware']['name']}")
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        for acceptance in acceptances:
            line = [point for point in points if (point["context"], point["acceptance"]) == (context, acceptance)]
            batches, speedups = ([point[name] for point in line] for name in ("batch", "speedup"))
            axes.plot(batches, speedups, marker="o", label=acceptance)
        axes.axhline(1, color="0.5", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=f"context {context}", xlabel="batch", ylabel="times plain decoding")
        axes.legend(title="acceptance")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
