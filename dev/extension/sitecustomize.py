"""Python imports this at its start where dev/sanitize.py or dev/emulate_arm.py put this folder on the path: the
extension that they built takes the place of the installed one, in every process that the tests start too."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class GivenExtension:
    """Finds the one module."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        given = os.environ.get("WAGER_EXTENSION")
        if name != "wager.kernels._native" or given is None:
            return None
        return importlib.util.spec_from_file_location(name, given)


sys.meta_path.insert(0, GivenExtension)  # type: ignore[arg-type]
