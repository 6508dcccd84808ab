"""Keys of plans that a test has made otherwise than the planner would: no other job takes them from the cache."""

from __future__ import annotations

from collections.abc import Callable

from rannd.daemon.common.keys import Key, make_key
from rannd.runtime.planning.plan_provider import Planner


def own_keys(what: str, how: str) -> Callable[[], None]:
    """Have the keys of all plans contain `how` they are made; returns what undoes it."""
    key = Planner._key

    def own_key(self: Planner) -> Key:
        found = key(self)
        return make_key(found.kind, {**found.components, what: how})

    Planner._key = own_key  # type: ignore[method-assign]

    def undo() -> None:
        Planner._key = key  # type: ignore[method-assign]

    return undo
