"""docs/architecture.md shows the tree as it is: every folder and file of the package, under the folder it is in."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def paths_on_the_page() -> set[str]:
    """Paths below src/wager as the tree draws them: two spaces of indent a folder, files at the start of a line."""
    tree = PAGE.read_text(encoding="utf-8").split("```\nsrc/wager/\n")[1].split("```")[0]
    found: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        if not line.startswith("  "):
            break  # what lies beside src/wager
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        for word in line.split():
            if word.endswith("/") and word == line.split()[0]:
                folders[depth:] = [word]
                found.add("".join(folders))
            elif re.fullmatch(r"[\w/]+\.py", word):
                found.add("".join(folders[:depth]) + word)
            else:
                break
    return found


def paths_on_disk() -> set[str]:
    """Paths below src/wager as they are, without the __init__ and __main__ of packages."""
    source = ROOT / "src" / "wager"
    files = {str(path.relative_to(source)) for path in source.rglob("*.py") if not path.name.startswith("__")}
    return files | {
        f"{path.parent.relative_to(source)}/" for path in source.rglob("__init__.py") if path.parent != source
    }


def test_the_page_shows_every_folder_and_file() -> None:
    assert paths_on_the_page() == paths_on_disk()
