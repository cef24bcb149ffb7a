"""Errors of the tokenizers library, which raises plain exceptions and panics, as TokenizerErrors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wager.arch.config_keys import brief
from wager.errors import TokenizerError, WagerError


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Whatever the tokenizers library raises inside, as a TokenizerError about `where`."""
    try:
        yield
    except WagerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, by PyO3
            raise
        raise TokenizerError(
            f"The tokenizer of {where} is damaged: {brief(error)}.", "Fetch the model again."
        ) from error
