"""Builds the native extension with sanitizers, in a folder of its own, and runs tests with it.

    python dev/sanitize.py address              # AddressSanitizer and UndefinedBehaviorSanitizer
    python dev/sanitize.py thread               # ThreadSanitizer
    python dev/sanitize.py thread --reduced     # what continuous integration runs
    python dev/sanitize.py address tests/kernels/test_products.py -- -k avx2 -x

Without tests the whole set of the sanitizer is run; what is behind `--` goes to pytest. First the build shows
that it finds faults that are there on purpose (dev/sanitizers/faults.cpp). A report fails the run, also one of a
process that a test started. Exit status: 0 no report and no failure, 1 otherwise, 77 where it cannot be built: that
needs g++ with its sanitizers, and cmake, ninja and nanobind (pip install -c constraints.txt cmake ninja nanobind).

The build is in build/sanitize-NAME; the extension that other programs use stays as it is. Python itself has no
sanitizers: their runtime is preloaded, and its allocations come from malloc, where they are seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNAVAILABLE = 77
ALL = ["-m", "slow or not slow"]
# ThreadSanitizer cannot follow threads that a forked child starts.
NO_FORK = ["--deselect", "tests/kernels/test_pool.py::test_a_forked_child_can_compute"]


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """`runtime` is the library to preload, `options` its variable and settings. `faults` are functions of faults.cpp
    that it must report, each with a word of the report. `whole` and `reduced` are pytest's arguments."""

    flags: str
    runtime: str
    options: Mapping[str, str]
    faults: Mapping[str, str]
    whole: Sequence[str]
    reduced: Sequence[str]


def _unit(*names: str) -> list[str]:
    return [f"tests/unit/test_{name}.py" for name in names]


SANITIZERS = {
    "address": Sanitizer(
        "address,undefined",
        "libasan.so",
        # CPython frees nothing at its end, and tests ask for more memory than there is.
        {
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:log_path={reports}/asan",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",  # beside ASan it writes to stderr, whatever log_path
        },
        {
            "read_behind_the_heap": "heap-buffer-overflow",
            "read_behind_a_buffer": "use-after-poison",
            "overflow_a_sum": "signed integer overflow",
        },
        [
            *ALL,
            "tests/kernels",
            "tests/economics/test_native_policy.py",
            *_unit(
                "learned_texts",
                "draft_ahead",
                "engine",
                "loading",
                "lookup",
                "models_gguf",
                "ngram",
                "pack",
                "recurrent",
                "recycling",
                "store_file",
            ),
        ],
        [
            "tests/kernels/test_bounds.py",
            "tests/kernels/test_packed_parts.py",
            "tests/kernels/test_step.py",
            "tests/economics/test_native_policy.py",
            *_unit("learned_texts", "engine", "lookup", "ngram", "pack", "recycling"),
        ],
    ),
    "thread": Sanitizer(
        "thread",
        "libtsan.so",
        # Accesses of libraries without TSan are not judged; their locks are followed, the interpreter's among them. No
        # suppressions are needed then.
        {
            "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1:history_size=4:"
            "log_path={reports}/tsan"
        },
        {"race": "data race"},
        [
            *ALL,
            *NO_FORK,
            "tests/kernels/test_products.py",
            "tests/kernels/test_pool.py",
            "tests/kernels/test_recurrence.py",
            "tests/kernels/test_rows.py",
            "tests/kernels/test_step.py",
            *_unit("draft_ahead", "draft_threads", "llm"),
        ],
        [
            *ALL,
            *NO_FORK,
            "tests/kernels/test_pool.py",
            "tests/kernels/test_step.py",
            *_unit("draft_ahead", "llm"),
        ],
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--reduced", action="store_true", help="the tests that continuous integration runs")
    parser.add_argument("tests", nargs="*", help="files of tests, instead of a set")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    sanitizer, folder = SANITIZERS[options.sanitizer], ROOT / "build" / f"sanitize-{options.sanitizer}"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    libraries = [_library(compiler, name) for name in (sanitizer.runtime, "libstdc++.so")] if compiler else [None]
    if compiler is None or None in libraries or not build(sanitizer, folder, compiler):
        return unavailable(options.sanitizer, f"g++ with {sanitizer.runtime}, cmake, ninja or nanobind is missing")
    preloaded = " ".join(map(str, libraries))
    run = Run(sanitizer, folder, {"LD_PRELOAD": preloaded})
    if not run.starts():
        return unavailable(options.sanitizer, f"{sanitizer.runtime} does not support the addresses of this system")
    run.check_faults()
    tests = options.tests or (sanitizer.reduced if options.reduced else sanitizer.whole)
    return run.tests([*tests, *sys.argv[end + 1 :]])


def unavailable(name: str, cause: str) -> int:
    print(f"Sanitizer {name}: NOT RUN, because {cause}.", flush=True)
    return UNAVAILABLE


def _library(compiler: str, name: str) -> str | None:
    """The path of a library of the compiler, None if it has none of that name."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return found.strip() if Path(found.strip()).is_absolute() else None


def build(sanitizer: Sanitizer, folder: Path, compiler: str) -> bool:
    """Whether it could be built at all; an error of the compiler ends the program."""
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    found = subprocess.run([sys.executable, "-c", "import nanobind"], capture_output=True, check=False).returncode == 0
    if cmake is None or ninja is None or not found:
        return False
    configure = [
        cmake,
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DWAGER_SANITIZE={sanitizer.flags}",
        "--log-level=WARNING",
    ]
    for command in (configure, [cmake, "--build", str(folder)]):
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit("The build with sanitizers failed.")
    return True


class Run:
    """Python with the sanitizer's runtime and the extension in `folder`."""

    def __init__(self, sanitizer: Sanitizer, folder: Path, environment: Mapping[str, str]) -> None:
        self.reports, self._sanitizer, self._folder = folder / "reports", sanitizer, folder
        [self._extension] = folder.glob("_native*.so")
        fixed = ["setarch", "--addr-no-randomize"]  # some containers forbid it
        allowed = shutil.which("setarch") and not subprocess.run([*fixed, "true"], stderr=subprocess.DEVNULL).returncode
        self._prefix = fixed if allowed else []
        options = {name: text.format(reports=self.reports) for name, text in sanitizer.options.items()}
        path = [str(ROOT / "dev" / "extension"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            **environment,
            **options,
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "WAGER_EXTENSION": str(self._extension),
        }

    def starts(self) -> bool:
        """Whether Python starts with the runtime: older ones of TSan refuse addresses that are too random."""
        done = self._python("-c", "", stderr=subprocess.PIPE)
        found = done.stderr + self._found()
        if done.returncode and "unexpected memory mapping" not in found:
            raise SystemExit(f"Python does not start with {self._sanitizer.runtime}: {found}")
        return done.returncode == 0

    def check_faults(self) -> None:
        """SystemExit unless every fault is reported and fails, and what is no fault is not."""
        library = self._folder / "libsanitizer_faults.so"
        for name, word in [*self._sanitizer.faults.items(), ("no_fault", "")]:
            done = self._python(
                "-c", f"import ctypes; raise SystemExit(ctypes.CDLL({str(library)!r}).{name}())", stderr=subprocess.PIPE
            )
            status, reports = done.returncode, done.stderr + self._found()
            if bool(word) != bool(status) or bool(word) != bool(reports) or word not in reports:
                raise SystemExit(f"{name}: exit status {status}, and {reports or 'no report'}")
            print(f"{name}: {f'reported ({word})' if word else 'no report'}, exit status {status}", flush=True)

    def tests(self, arguments: Sequence[str]) -> int:
        used = "from wager.kernels import _native; print('extension:', _native.__file__)"
        if self._python("-c", f"{used}; assert _native.__file__ == {str(self._extension)!r}").returncode:
            raise SystemExit("The extension with sanitizers is not the one that is imported.")
        self._found()
        status = self._python("-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *arguments).returncode
        reports = self._found()
        print(reports or "no report of the sanitizer")
        return int(bool(status or reports))

    def _python(self, *arguments: str, stderr: int | None = None) -> subprocess.CompletedProcess[str]:
        command = [*self._prefix, sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=self._environment, stderr=stderr, text=True, check=False)

    def _found(self) -> str:
        """The reports since the last call."""
        files = sorted(self.reports.iterdir()) if self.reports.exists() else []
        texts = [file.read_text(errors="replace") for file in files]
        shutil.rmtree(self.reports, ignore_errors=True)
        self.reports.mkdir()
        return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
