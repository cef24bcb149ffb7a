"""Links and paths in the documents lead somewhere: files, headings, and what docs/architecture.md names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted((ROOT / "dev").glob("*.md")), *sorted(ROOT.glob(".github/**/*.md"))]
"""Every page that is kept; names are relative to the repository."""

NO_PATHS = {"config.json", "model.safetensors", "tokenizer.json"}


def prose(page: Path) -> str:
    """The text of a page without what stands in blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return set(found)


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    return dead


def named_paths(page: Path) -> set[str]:
    """What a page names in backticks that has the form of a path of the repository."""
    named = re.findall(r"`([\w./-]+)`", prose(page))
    return {name for name in named if re.search(r"\.(py|h|cpp|md)$|\w/$", name)} - NO_PATHS


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / "src" / "wager" / path).exists()


def test_links_lead_somewhere(tmp_path: Path) -> None:
    assert {str(page.relative_to(ROOT)): dead for page in PAGES if (dead := dead_links(page))} == {}
    page = tmp_path / "page.md"
    page.write_text("# A: `b` c\n[1](#a-b-c) [2](#a-c) [3](page.md#a-b-c) [4](none.md) [5](https://x.y/#z)\n", "utf-8")
    assert dead_links(page) == ["#a-c", "none.md"]


def test_paths_that_are_named_exist() -> None:
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        paths = named_paths(ROOT / name)
        assert len(paths) > 10
        assert [path for path in sorted(paths) if not exists(path)] == []
    assert not exists("engine/none.py")


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[[^]]*\]\(([^)#]+)\): \w", (ROOT / "docs" / "index.md").read_text("utf-8"), re.MULTILINE)
    pages = {page.name for page in DOCS} - {"index.md"}
    assert sorted(target for target in listed if "/" not in target) == sorted(pages)
