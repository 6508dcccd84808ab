"""The line of the log that tells who waits for whom: not a failure, one line for a wait of `wait_notice_s` seconds.

::

    rank 0 waits for rank 1 in state_dict at train.py:41; rank 1 is in your code at train.py:57

The hub of the side channel asks all ranks once a rank has waited for so long, and `notice` puts their answers in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rannd.runtime.failure import stack_dump
from rannd.runtime.failure.position import SAVING, Where
from rannd.runtime.failure.side_channel import Stacks

STILL_S = 1.0
"""Seconds without progress from which on a rank that is asked counts as waiting: every rank waits for moments."""
MOST_RANKS = 8
"""Maximum number of ranks that are named one by one."""


def notice(asked_by: int, answers: Mapping[int, Stacks], silent: Collection[int], left: Collection[int]) -> str:
    """The line for the answers of all ranks; '' if the rank that asked does not wait any more.

    Args:
        asked_by: The rank that has waited for too long.
        answers: What the ranks do.
        silent: Ranks that did not answer.
        left: Ranks whose scripts have ended.
    """
    if asked_by not in answers or not answers[asked_by].still or answers[asked_by].doing != "waiting":
        return ""
    waiting = [rank for rank in sorted(answers) if rank == asked_by or _waits(answers[rank])]
    others = sorted({*answers, *silent, *left} - set(waiting))
    places: dict[str, list[int]] = {}
    for rank in [asked_by, *waiting]:
        ranks = places.setdefault(_place(answers[rank]), [])
        if rank not in ranks:
            ranks.append(rank)
    reason = f" for {names(others)}" if others else ""
    parts = []
    for place, ranks in places.items():
        parts.append(f"{names(sorted(ranks))} {'wait' if len(ranks) > 1 else 'waits'}{reason} {place}")
        reason = ""
    for rank in others[:MOST_RANKS]:
        if rank in left:
            parts.append(f"rank {rank} has ended its script")
        elif rank in silent:
            parts.append(f"rank {rank} does not answer: it is stopped, or native code holds the GIL")
        else:
            parts.append(f"rank {rank} {_doing(answers[rank])}")
    here = answers[asked_by]
    if any(rank in left or (rank in answers and answers[rank].doing == "script") for rank in others):
        parts += [hint] if (hint := collective(here.call)) else []
    return "; ".join(parts)


def is_expected(asked_by: int, answers: Mapping[int, Stacks]) -> bool:
    """Whether another rank works inside rannd (a long first call, a checkpoint), so that nothing needs to be done."""
    return any(rank != asked_by and each.doing != "script" and not _waits(each) for rank, each in answers.items())


def collective(call: str) -> str:
    """'state_dict is collective: ..' for functions that scripts call on one rank by mistake; '' for calls of models."""
    if call in ("", "forward", "backward", SAVING):
        return ""
    state = "; rank 0 gets the state" if call == "state_dict" else ""
    return f"{call} is collective: all ranks have to call it{state}"


def of_connecting(rank: int, size: int, where: Where) -> str:
    """The line for a rank that waits until the ranks are connected: it knows of itself only."""
    place = at(stack_dump.entry(where), stack_dump.user_line(where))
    return (
        f"rank {rank} waits for other ranks to connect {place}: each of the {size} ranks has to create a RaNNCModule "
        "(or call another collective function of pyrannc)"
    )


def names(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0, 1, 2 .. (63 of them)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"ranks {', '.join(map(str, ranks[:3]))} .. ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def at(call: str, line: str) -> str:
    """``in state_dict at train.py:41``."""
    return " ".join([*([f"in {call}"] if call else []), *([f"at {line}"] if line else [])])


def _waits(answer: Stacks) -> bool:
    return answer.doing == "waiting" and answer.still >= STILL_S


def _place(answer: Stacks) -> str:
    return at(answer.call, answer.line_of_user)


def _doing(answer: Stacks) -> str:
    if answer.doing == "script":
        return f"is {at('your code', answer.line_of_user)}"
    return f"works {_place(answer)}" + (f" ({answer.activity})" if answer.activity else "")
