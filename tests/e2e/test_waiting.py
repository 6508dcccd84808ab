"""What is told while a rank waits for another one: who, for whom, where; once, and the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job import ROOT, Job
from thinned import first

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/waiting.py"
LINE = next(n for n, line in enumerate((ROOT / PROGRAM).read_text().splitlines(), 1) if "while not TOLD" in line)
SOON = {"RANNC_WAIT_NOTICE_S": "1"}


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.long), "2"])
@pytest.mark.parametrize(
    ("what", "level", "text"),
    first(
        1,
        [
            (
                "state_dict",
                "warning",
                r"rank 0 waits for rank 1 in state_dict at waiting.py:\d+; rank 1 is in your code at waiting.py:LINE; "
                "state_dict is collective: all ranks have to call it; rank 0 gets the state",
            ),
            (
                "connect",
                "warning",
                r"rank 0 waits for other ranks to connect in RaNNCModule at waiting.py:\d+: each of the 2 ranks has to "
                r"create a RaNNCModule \(or call another collective function of pyrannc\)",
            ),
            (
                "tracing",
                "info",
                r"rank 1 waits for rank 0 in forward at waiting.py:\d+; "
                r"rank 0 works in forward at waiting.py:LINE \(tracing\)",
            ),
        ],
    ),
)
def test_a_wait_is_told_once_and_is_no_failure(
    job: Job, tmp_path: Path, what: str, level: str, text: str, stages: str
) -> None:
    output = job.train(2, PROGRAM, what, str(tmp_path), RANNC_PARTITION_NUM=stages, RANNC_CACHE="off", **SOON)
    text = text.replace("LINE", str(LINE))
    told = re.findall(r"\[RaNNCProcess\] \[(\w+)\] (.* waits for .*)", output)
    # On a busy machine more is told: of waits for a rank that works in its first call, which is no alarm either, and of
    # a rank that waits for a slower one to connect.
    assert [each for each, line in told if re.fullmatch(text, line)] == [level], output
    others = [(each, line) for each, line in told if not re.fullmatch(text, line)]
    assert all(
        each == "info" or re.match(r"rank \d waits for other ranks to connect", line) for each, line in others
    ), output
    assert output.count("saved") == 2


@pytest.mark.long
@pytest.mark.parametrize("stages", ["1", "2"])
def test_saving_on_rank_0_alone_after_the_others_have_ended(job: Job, tmp_path: Path, stages: str) -> None:
    output = job.train(2, PROGRAM, "ended", str(tmp_path), code=1, RANNC_PARTITION_NUM=stages)
    text = (
        r"StepError: a connection to another rank broke in .*: rank 1 has ended its script; state_dict is collective: "
        r"all ranks have to call it; rank 0 gets the state"
    )
    assert re.search(text, output), output
    assert re.search(rf"^rannc-run:   .*{text} \(waiting.py:\d+\)$", output, re.MULTILINE), output
