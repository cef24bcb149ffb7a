"""The kernels: doors to the C++ in csrc/, which does all arithmetic of a model.

Importing this package fails with a WagerError where the C++ extension cannot be imported. tests/oracle/kernels.py has
every op in plain numpy.
"""

from __future__ import annotations

from wager.errors import WagerError

try:
    from wager.kernels import _native  # noqa: F401
except ImportError as error:
    raise WagerError(
        f"wager's C++ extension cannot be imported: {error}.",
        "Install wager again with the Python that runs it, in a copy of its repository: "
        "`python -m pip install --force-reinstall --no-deps .`",
    ) from error
