"""The page of a plan as a file: bounded, self-contained, made without torch, and harmless whatever the names are."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from shown_plans import ATTACK, attacking, large, measured, planned

from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.plan_text import show
from rannd.runner.page.html_page import MOST_BYTES, ShownPlan, page, page_data
from rannd.runner.page.page_data import PlanPage

LOOSE_S = 30
"""Far above what a page of 10,000 operators takes on a busy machine; `bench/page.py` says what it does take."""


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)


def of(plan: Deployment) -> ShownPlan:
    return ShownPlan("a" * 40, plan, None)


def data_of(made: bytes) -> PlanPage:
    data = next(each for each in Elements(made.decode()).scripts if each.startswith("{"))
    return msgspec.json.decode(data, type=PlanPage)


@pytest.fixture(scope="module")
def ten_thousand() -> Deployment:
    return large()


def test_the_page_has_its_data_as_it_is() -> None:
    plan = planned()
    found = page_data(of(plan), "today", of(plan))
    assert data_of(page(of(plan), "today", of(plan))) == found
    assert found.text == show(plan)


def test_ten_thousand_operators_fit_in_the_bounds(ten_thousand: Deployment) -> None:
    entry = ShownPlan("a" * 40, ten_thousand, measured(ten_thousand, events=True))
    begun = time.perf_counter()
    made = page(entry, "today", of(ten_thousand))
    assert time.perf_counter() - begun < LOOSE_S
    assert len(made) <= MOST_BYTES
    found = data_of(made)
    assert (len(found.ops.names), found.ops.left_out) == (10_000, 0)
    assert sum(stage.ops for stage in found.stages) == 10_000
    assert len(found.timelines) == 3


def test_it_is_made_without_torch(ten_thousand: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_bytes(encode(ten_thousand))
    program = (
        "import sys; from pathlib import Path; from rannd.plan.deployment import decode; "
        "from rannd.runner.cache import show_entry; from rannd.runner.page.html_page import ShownPlan, page; "
        "made = page(ShownPlan('a' * 40, decode(Path(sys.argv[1]).read_bytes()), None), 'today'); "
        "print(len(made), [name for name in ('torch', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    size, slow = done.stdout.split(" ", 1)
    assert int(size) > 100_000
    assert slow == "[]\n"


def test_a_page_that_would_be_too_large_leaves_operators_out_and_says_so(ten_thousand: Deployment) -> None:
    table = ten_thousand.table
    assert table is not None
    count = len(table.targets)
    # Each operator has texts of its own, of letters that take six bytes each.
    texts = tuple(f"{number:05d}" + "<" * 150 for number in range(count))
    wide = msgspec.structs.replace(table, texts=texts, modules=tuple(range(count)), sources=tuple(range(count)))
    made = page(of(msgspec.structs.replace(ten_thousand, table=wide)), "today")
    found = data_of(made)
    assert len(made) <= MOST_BYTES
    assert found.ops.left_out > 0
    assert len(found.ops.names) + found.ops.left_out == count
    if found.ops.names:
        assert found.ops.texts[found.ops.module[3]].startswith(texts[3][:100])
    assert sum(stage.ops for stage in found.stages) == count
    assert any(stage.left_out for stage in found.stages)
    assert found.shortened == ""


def test_a_plan_of_thousands_of_stages_has_a_page_too() -> None:
    small = planned(partition_num=2, memory=10**9)
    (stage, _), count = small.stages, 3000
    estimate = msgspec.structs.replace(stage.estimate, weight_us=0.0)
    stages = tuple(
        msgspec.structs.replace(stage, slots=(slot,), ops=(f"op{slot}",), estimate=estimate, modules="<" * 80)
        for slot in range(count)
    )
    slots = tuple(Slot(0, device) for device in range(count))
    plan = msgspec.structs.replace(
        small, slots=slots, stages=stages, batch_rows=count, microbatches=1, planned=None, table=None
    )
    made = page(of(decode(encode(plan))), "today", of(plan))
    assert len(made) <= MOST_BYTES
    assert "too large for a page" in data_of(made).shortened
    assert len(data_of(made).stages) == 100


def test_names_from_a_model_or_a_file_are_text() -> None:
    plan = attacking(planned(partition_num=2))
    entry = ShownPlan("a" * 40, plan, measured(plan))
    made = page(entry, ATTACK, entry).decode()
    elements = Elements(made)
    assert [tag for tag, _ in elements.found if tag in ("script", "img")] == ["script", "script"]
    data = next(each for each in elements.scripts if each.startswith("{"))
    assert not re.search("[<>&\u2028\u2029]", data)
    assert "</script>" in data_of(made.encode()).written
    assert "<img" in data_of(made.encode()).stages[0].modules


def test_the_page_asks_nobody_for_anything() -> None:
    made = page(of(planned()), "today").decode()
    for tag, attributes in Elements(made).found:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
        assert not any(name.startswith("on") for name in attributes), tag
    (policy,) = (
        attributes["content"]
        for tag, attributes in Elements(made).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_a_deployment_of_an_older_version_has_a_page_without_what_it_lacks() -> None:
    plan = msgspec.structs.replace(planned(partition_num=2), planned=None, table=None)
    found = data_of(page(ShownPlan("a" * 40, plan, measured(plan)), "today"))
    assert found.timelines == ()
    assert "did not store" in found.timeline_note
    assert found.edges == ()
    assert [stage.layers for stage in found.stages] == [(), ()]
    assert len(found.ops.names) == sum(len(stage.ops) for stage in plan.stages)
    assert found.costs
    assert found.verdict.measured_us == pytest.approx(1.2 * plan.step_us, rel=0.01)


def test_the_verdict_names_the_runner_up_and_why_it_lost() -> None:
    plan = planned(memory=10**9)
    found = page_data(of(plan), "today").verdict
    fitting = [each for each in plan.alternatives if not each.over_bytes]
    assert fitting, "the test needs a plan that lost"
    assert found.runner is not None
    assert found.runner.step_us == min(each.step_us for each in fitting)
    assert "slower" in found.runner.why
    assert [each.name for each in found.others] == [each.name for each in plan.alternatives]
    assert found.certificate.startswith("With these costs")
    assert found.certificate.endswith(
        " E is a formula, the predicted step is simulated: it may be shorter than E, and than this bound."
    )
    cut = page_data(of(msgspec.structs.replace(plan, searched_all=False)), "today").verdict
    assert cut.certificate.startswith("The search was cut off")


def test_plans_that_do_not_fit_say_what_they_lack() -> None:
    plan = planned(memory=1_300_000)
    over = [each for each in page_data(of(plan), "today").verdict.others if not each.step_us]
    assert over
    assert all("too much" in each.why for each in over)


def test_memory_of_devices_is_that_of_the_plan() -> None:
    plan = planned(partition_num=2)
    found = page_data(of(plan), "today")
    assert found.memory_limit == plan.memory_bytes
    for device, stage in zip(found.memory, plan.stages, strict=True):
        assert device.used == stage.estimate.used_bytes
        assert sum(device.parts) == stage.estimate.total_bytes
        assert device.count == len(stage.slots)


def test_edges_have_the_bytes_and_times_of_the_links() -> None:
    plan = planned(partition_num=2, pipeline_num=4)
    found = page_data(of(plan), "today")
    between = next(edge for edge in found.edges if (edge.src, edge.dst) == ("stage 0", "stage 1"))
    sent = plan.stages[0].estimate.output_bytes
    assert between.values_bytes == between.grads_bytes == sent
    assert between.values_us == pytest.approx(10 + sent / 1000), "the link of plan_graphs.LINK"
    assert {edge.src for edge in found.edges} == {"the ranks", "stage 0", "stage 1"}
