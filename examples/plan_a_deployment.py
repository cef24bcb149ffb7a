"""Before a machine is rented: which draft depth pays, at which load, for a model on some machines.

    python examples/plan_a_deployment.py [MODEL] [HARDWARE ...]

Everything is computed from published figures; nothing is fetched or run. The acceptance is yours to measure, with
`wager acceptance`; 0.75 stands for a good head on chat. Known machines are in `wager plan --help`.
"""

from __future__ import annotations

import json
import subprocess
import sys

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen3-30B-A3B"
HARDWARE = sys.argv[2:] or ["H100", "H200", "B200"]


def plan(hardware: str) -> list[dict[str, float]]:
    """A point for each batch: depth, speed-up over plain decoding, seconds of a step."""
    command = [sys.executable, "-m", "wager.cli", "plan", "--model", MODEL, "--hardware", hardware]
    command += ["--batch", "1,8,64,256", "--context", "4k", "--acceptance", "0.75", "--drafter-shape", "mtp"]
    done = subprocess.run([*command, "--json", "-"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)
    points: list[dict[str, float]] = json.loads(done.stdout)["points"]
    return points


def main() -> None:
    print(f"{MODEL}, 4,096 positions a request, an MTP head that is right three times of four")
    print(f"{'machine':>8} {'batch':>6} {'depth':>6} {'speed-up':>9} {'tokens/s':>9}")
    for hardware in HARDWARE:
        for point in plan(hardware):
            seconds = point["step_s"] + point["draft_s"]
            rate = point["batch"] * point["tokens_per_round"] / seconds
            print(f"{hardware:>8} {point['batch']:>6} {point['depth']:>6} {point['speedup']:>9.2f} {rate:>9.0f}")


if __name__ == "__main__":
    main()
