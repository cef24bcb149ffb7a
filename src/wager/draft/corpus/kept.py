"""What is learned of a tenant's texts, kept on disk beside them for later processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from wager.errors import MALFORMED
from wager.tenants import PerTenant

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts

log = logging.getLogger("wager")

T = TypeVar("T")


class KeptPerTenant(PerTenant[T]):
    """A PerTenant of which later processes go on with what was `kept` of a tenant under `name`, beside its texts.
    `save` gives the state of a value, None if it has none; `restore` takes one, and answers False, or raises one of
    MALFORMED, if the value begins anew: then there is a `warning`."""

    def __init__(
        self,
        make: Callable[[], T],
        kept: LearnedTexts | None,
        name: str,
        *,
        save: Callable[[T], bytes | None],
        restore: Callable[[T, bytes], bool],
        warning: str,
    ) -> None:
        super().__init__(make, made=None if kept is None else self._start_from_kept)
        self._kept, self._name, self._save, self._restore, self._warning = kept, name, save, restore, warning
        if kept is not None:
            kept.before_close.append(self._keep)

    def _start_from_kept(self, tenant: str, value: T) -> None:
        state = None if self._kept is None else self._kept.state(tenant, self._name)
        try:
            usable = state is None or self._restore(value, state)
        except MALFORMED:
            usable = False
        if not usable:
            log.warning(self._warning)

    def _keep(self) -> None:
        for tenant, value in self.items():
            if self._kept is not None and (state := self._save(value)) is not None:
                self._kept.keep(tenant, self._name, state)
