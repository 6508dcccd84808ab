"""An errand that does nothing, for tests of monitors: each redefines what it looks at."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rannd.runner.watch.errand import HeldPart, RescueOrder
from rannd.runner.watch.notice_socket import Notice, Noticed


class IdleErrand:
    """Of the protocol in rannd/runner/watch/errand.py."""

    leave_s = rescue_s = 60.0

    def due(self) -> float:
        return time.monotonic() + 60

    def run(self, leave: Callable[[float], None]) -> None:
        pass

    def take_note(self, note: dict[str, Any]) -> None:
        pass

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        raise AssertionError(f"a notice for {notice}")

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        assert not held
        return None

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        raise AssertionError(f"nobody has planned {order}")
