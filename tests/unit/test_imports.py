"""What is imported, and when: help without numpy, an engine without what only some of its uses need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wager


def imported_by(code: str) -> set[str]:
    """Names of the modules that a new process has after running `code`."""
    shown = f"{code}\nimport sys; print('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], check=True, capture_output=True, text=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import wager; wager.EngineConfig, wager.SamplingParams, wager.UsageError",
        "from wager.cli import main; main(['--help'])",
        "from wager.cli import main; main(['run', '--help'])",
    ],
)
def test_neither_the_package_nor_help_imports_numpy(code: str) -> None:
    modules = imported_by(code)
    assert "wager" in modules
    assert not modules & {"numpy", "gguf", "tokenizers", "jinja2", "huggingface_hub", "wager.kernels"}


def test_an_engine_imports_only_what_every_model_needs() -> None:
    modules = imported_by("import wager; wager.LLM")
    assert {"numpy", "wager.llm", "wager.models.transformer"} <= modules
    needed_by_some = {"torch", "gguf", "jinja2", "huggingface_hub", "matplotlib", "safetensors", "yaml"}
    needed_by_some |= {"wager.profiling", "wager.models.random_models", "wager.draft.model", "wager.loading.heads"}
    assert not modules & needed_by_some


def test_every_public_name_is_found_and_listed() -> None:
    for name in wager.__all__:
        assert getattr(wager, name).__name__ == name
        assert name in dir(wager)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = wager.Nothing  # type: ignore[attr-defined]
