"""Instructions of the inner loops of products for ARM, by format and rows, in what dev/emulate_arm.py built.

    python dev/count_instructions.py i8mm --rows 1 4

The loop of a kernel is that with the most products; it goes over a block of 32 inputs (bf16: 16 pairs) of 16 outputs.
docs/arm.md has the table. How many of them a processor finishes in a cycle it does not say.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wager.kernels.blocks import BLOCK_FORMATS

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = ROOT / "build" / "arm" / "extension" / "CMakeFiles" / "_native.dir" / "csrc"
FORMATS = ["bf16", *BLOCK_FORMATS]  # in the order of WeightFormat
PRODUCTS = {"sdot": 16, "usdot": 16, "usmmla": 32, "bfmlalb": 4, "bfmlalt": 4, "fmla": 4}
"""Multiply-adds of an instruction; fmla counts with weights in floats alone, elsewhere it adds a block's sums."""


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def functions(instruction_set: str) -> Iterator[tuple[str, list[Instruction]]]:
    command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", f"kernels_{instruction_set}.cpp.o"]
    text = subprocess.run(command, cwd=OBJECTS, capture_output=True, text=True, check=True).stdout
    for name, body in re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", text, re.MULTILINE):
        lines = re.findall(r"^\s+([0-9a-f]+):\s+(\S+)(.*)$", body, re.MULTILINE)
        yield name, [Instruction(int(address, 16), word, rest) for address, word, rest in lines]


def multiply_adds(loop: list[Instruction], *, bf16: bool) -> int:
    return sum(PRODUCTS.get(each.name, 0) for each in loop if bf16 or each.name != "fmla")


def inner_loop(body: list[Instruction], *, bf16: bool) -> list[Instruction]:
    place = {each.address: index for index, each in enumerate(body)}
    best: list[Instruction] = []
    for index, each in enumerate(body):
        target = re.search(r"\b([0-9a-f]+) <", each.operands) if each.name.startswith(("b.", "cb", "tb")) else None
        start = place.get(int(target[1], 16)) if target else None
        if start is None or start > index:
            continue
        loop = body[start : index + 1]
        found, most = (multiply_adds(one, bf16=bf16) for one in (loop, best))
        if found > most or (found == most and len(loop) < len(best)):
            best = loop
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instruction_set", choices=("i8mm", "neon"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    options = parser.parse_args()
    print("format    rows  instructions  multiply-adds each  loads each")
    for name, body in functions(options.instruction_set):
        kernel = re.search(r"(?:block|e4m3)_panel<\(wager::WeightFormat\)(\d+), (\d+)>|bf16_panel<(\d+)>", name)
        if kernel is None:
            continue
        known, rows = (FORMATS[int(kernel[1])], int(kernel[2])) if kernel[1] else ("bf16", int(kernel[3]))
        if rows not in options.rows:
            continue
        floats = known == "bf16" or known.startswith("e4m3")
        loop = inner_loop(body, bf16=floats)
        loads, count = sum(each.name.startswith("ld") for each in loop), len(loop)
        each = multiply_adds(loop, bf16=floats) / count
        print(f"{known:9} {rows:4}  {count:12}  {each:18.2f}  {loads / count:10.2f}")


if __name__ == "__main__":
    main()
