"""Takes a better plan in the middle of a training (`replan = "now"`): when, and whether it is worth the time.

Rank 0 learns of the plan in a thread (`Calibration`). With the agreement at the begin of a call it tells the others,
and each says whether it is between two steps; if all are, all hear of the plan, the model is undeployed, and this call
deploys it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import msgspec

from rannd import log
from rannd.runtime.comm.world import World
from rannd.runtime.planning.plan_ahead import Better
from rannd.units import amounts_apart

NEXT, NOW = "next", "now"
"""Values of `replan`."""
_READY, _WANTED = 1, 2


class Replanning:
    """Whether a better plan is taken before the next step.

    Args:
        replan: Rank 0's configuration.
        total_calls: Calls of the model in the whole training, if the script has said so.
    """

    def __init__(self, replan: str, total_calls: int | None) -> None:
        self._now, self._total = replan == NOW, total_calls
        self._better: Better | None = None
        self.moving_s = 0.0
        """Seconds that deploying took, without tracing and planning; a change takes about twice as long."""
        self._untaken: weakref.finalize[[], Replanning] | None = None
        """Tells when the job ends that the plan was not taken."""
        self._unmeasured: weakref.finalize[[int], Replanning] | None = None
        """Tells when the job ends that no steps were measured, so that no plan could be found."""
        self._agreed = False
        """Whether the ranks have agreed to take it before this call."""
        self._tells = False
        """Whether this rank has told that it is taken."""
        self._following: Better | None = None
        """What to deploy next, on all ranks; None: what the cache has."""

    def await_steps(self, after: int) -> None:
        """Let rank 0 tell when the job ends if no plan's steps were measured, which is done `after` so many."""
        if self._now and self._unmeasured is None:
            self._unmeasured = weakref.finalize(self, _tell_unmeasured, after)

    def steps_measured(self) -> None:
        """Note that steps were measured, of this plan or one before."""
        if self._unmeasured is not None:
            self._unmeasured.detach()

    def found(self, better: Better) -> None:
        """Note, in any thread of rank 0, a plan that is in the cache."""
        log.get("RaNNCModule").info(
            "Measured costs make another plan %.0f %% faster, %.1f ms instead of %.1f ms a step; %s: %s",
            100 * (1 - better.step_us / better.before_us),
            better.step_us / 1e3,
            better.before_us / 1e3,
            "replan=now" if self._now else "the next run takes it",
            better.line,
        )
        if self._now:
            self._better = better
            self._untaken = weakref.finalize(self, _tell_untaken)

    def told(self, step: int, *, ready: bool) -> int:
        """Return what this rank tells the others before call number `step`; `ready`: whether it is between steps."""
        better = self._better  # a thread may set it meanwhile
        if better is not None and ready and not self._pays(better, step):
            better = self._better = None
        return _READY * ready + _WANTED * (better is not None)

    def heard(self, told: Sequence[int]) -> None:
        """Hear what all ranks have told."""
        self._agreed = bool(told[0] & _WANTED) and all(each & _READY for each in told)

    def take(self, *, as_planned: bool) -> bool:
        """Return whether the plan is to be taken now, on all ranks alike. A training changes its plan once.

        `as_planned`: whether the call is of the graph and with the rows that plans are for.
        """
        taken, self._agreed = self._agreed and as_planned, False
        if taken:
            self._now = False
        return taken

    def on_all_ranks(self, world: World) -> Better:
        """Return the plan that is taken. Collective."""
        data = b"" if self._better is None else msgspec.msgpack.encode(self._better)
        return msgspec.msgpack.decode(world.broadcast_bytes(data), type=Better)

    def follow(self, better: Better) -> None:
        """Let the next deployment be this one."""
        self._following = better

    def following(self) -> Better | None:
        """Return what to deploy next, once; None: what the cache has."""
        better, self._following = self._following, None
        return better

    def tell_taken(self, lacking: tuple[int, int] | None) -> None:
        """Log on rank 0 that the plan is taken, or what a rank lacks for it: bytes that it needs, and that are free."""
        self._tells, self._better = self._better is not None, None
        if not self._tells:
            return
        self._told_why()
        if lacking is None:
            log.get("RaNNCModule").info("The better plan is taken now, which takes about %.1f s", 2 * self.moving_s)
        else:
            need, there = amounts_apart(*lacking)
            log.get("RaNNCModule").warning(
                "The next run takes the better plan: for a change each rank has the whole model for a while, which "
                "needs %s with the memory of the plan, but only %s are free",
                need,
                there,
            )

    def tell_failed(self, error: Exception) -> None:
        """Log on rank 0 that the model cannot be undeployed, for a reason that all ranks have; nothing has changed."""
        if self._tells:
            log.get("RaNNCModule").warning("The next run takes the better plan: %s", error)

    def _pays(self, better: Better, step: int) -> bool:
        """Whether the steps that remain, if that is known, save more time than the change takes."""
        if self._total is None:
            return True
        left = max(self._total - step, 0)
        saved_s, change_s = left * (better.before_us - better.step_us) / 1e6, 2 * self.moving_s
        if saved_s > change_s:
            return True
        log.get("RaNNCModule").info(
            "The next run takes the better plan: it saves %.1f s of the remaining %d calls, a change takes %.1f s",
            saved_s,
            left,
            change_s,
        )
        self._told_why()
        return False

    def _told_why(self) -> None:
        if self._untaken is not None:
            self._untaken.detach()


def _tell_unmeasured(after: int) -> None:
    log.get("RaNNCModule").warning(
        "replan=now had no effect: steps are measured from the second to number %d (calibrate_after), of those with "
        "the rows and sizes that were planned for, whose gradients are reduced in their backward; the training had "
        "fewer",
        after + 1,
    )


def _tell_untaken() -> None:
    log.get("RaNNCModule").info(
        "The next run takes the better plan: after it was found no call of the model came between two steps, that is "
        "without gradients that wait for their reduction, earlier calls without a backward, or averages in the model's "
        "place"
    )
