"""What steps did since the start, added up once for the metrics and the dashboard."""

from __future__ import annotations

from dataclasses import dataclass, field

from wager.types import StepRecord


@dataclass(slots=True)
class StepTotals:
    """Steps, tokens that they emitted, their rows, and their seconds by stage."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += record.emitted
        self.rows += record.rows
        for stage, seconds in record.seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
