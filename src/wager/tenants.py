"""What is kept of requests belongs to a tenant: whoever's requests they are, in a server the API key.

Guesses, rates and cached keys of one tenant are never used for another: they would tell what its texts are. Without
keys there is one tenant, "".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Generic, Protocol, TypeVar

from wager.types import NO_TENANT

MOST_TENANTS = 32
"""Tenants of which something is kept at a time while none of their sequences runs."""

T = TypeVar("T")


def tenant_of_key(key: str) -> str:
    """The tenant whose requests have this API key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def tenant_of_user(tenant: str, user: str) -> str:
    """The tenant of a request where `user` ("": nobody is named) is one of several who share a key."""
    return sha256(f"{tenant}\0{user}".encode()).hexdigest() if user else tenant


class HasTenant(Protocol):
    """Whatever belongs to a tenant: a sequence of this engine, or another engine's."""

    @property
    def tenant(self) -> str: ...


class PerTenant(Generic[T]):
    """One value for each tenant, made by `make` when its first sequence enters; `made` is called with the tenant and a
    new value. Beyond `most` tenants the values that no sequence uses are dropped, the least recently used first."""

    def __init__(
        self, make: Callable[[], T], *, most: int = MOST_TENANTS, made: Callable[[str, T], object] | None = None
    ) -> None:
        self._make = make
        self._made = made
        self._most = most
        self._values: OrderedDict[str, T] = OrderedDict()
        self._tenants: dict[str, str] = {}  # of sequences
        self._sequences: dict[str, int] = {}  # of tenants, how many there are

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> list[T]:
        """The values of all tenants."""
        return list(self._values.values())

    def items(self) -> list[tuple[str, T]]:
        """The tenants and their values."""
        return list(self._values.items())

    @property
    def present(self) -> Collection[str]:
        """The tenants of which sequences run."""
        return self._sequences

    def enter(self, seq_id: str, tenant: str) -> None:
        """A sequence of this tenant begins; it leaves the one that it was in."""
        self.leave(seq_id)
        self._tenants[seq_id] = tenant
        self._sequences[tenant] = self._sequences.get(tenant, 0) + 1
        self.get(tenant)

    def leave(self, seq_id: str) -> T | None:
        """A sequence ended; the value of its tenant. None of one that never entered, and if the value was dropped."""
        tenant = self._tenants.pop(seq_id, None)
        if tenant is None:
            return None
        value = self._values.get(tenant)
        self._sequences[tenant] -= 1
        if not self._sequences[tenant]:
            del self._sequences[tenant]
            self._drop_unused()
        return value

    def tenant(self, seq_id: str) -> str:
        """The tenant that a sequence entered as; NO_TENANT of one that never did."""
        return self._tenants.get(seq_id, NO_TENANT)

    def of(self, seq_id: str) -> T:
        """The value of a sequence's tenant."""
        tenant = self._tenants.get(seq_id, NO_TENANT)
        value = self._values.get(tenant)
        return value if value is not None and len(self._values) == 1 else self.get(tenant)

    def get(self, tenant: str) -> T:
        """The value of a tenant, which is used now."""
        value = self._values.get(tenant)
        if value is None:
            value = self._values[tenant] = self._make()
            if self._made is not None:
                self._made(tenant, value)
            self._drop_unused()
        elif len(self._values) > 1:
            self._values.move_to_end(tenant)
        return value

    def clear(self) -> None:
        """Drop the values of all tenants; their sequences get new ones."""
        self._values.clear()

    def _drop_unused(self) -> None:
        newest = next(reversed(self._values), None)
        for tenant in list(self._values):
            if len(self._values) <= self._most:
                return
            if tenant not in self._sequences and tenant != newest:
                del self._values[tenant]
