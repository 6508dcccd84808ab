"""The page of a plan, as a browser shows it: nothing fails, nothing is taken for code, all of it works with keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from headless import chromium
from shown_plans import ATTACK, attacking, large, measured, planned

from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import MeasuredStep
from rannd.runner.page.html_page import ShownPlan, page

NAMED = """
return [...document.querySelectorAll("button, input, canvas, summary, a, [tabindex]")].filter((each) =>
  !(each.getAttribute("aria-label") || each.textContent.trim() || document.querySelector(`label[for="${each.id}"]`))
).map((each) => each.outerHTML.slice(0, 200))
"""
"""What has the keyboard's focus and no name."""


class Shown:
    """A browser, and the pages that it was given."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def look(self, width: int = 1280, scheme: str = "light") -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def open(self, plan: Deployment, took: MeasuredStep | None = None, other: Deployment | None = None) -> None:
        file = self.folder / "page.html"
        compared = None if other is None else ShownPlan("b" * 40, other, None)
        file.write_bytes(page(ShownPlan("a" * 40, plan, took), "written today", compared))
        self.driver.get_log("browser")  # what earlier pages said
        self.driver.get(file.as_uri())
        assert self.run("return document.documentElement.dataset.drawn") == "yes", self.driver.get_log("browser")

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def keys(self, selector: str, *keys: str) -> None:
        self.run("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield Shown(driver, tmp_path_factory.mktemp("pages"))


@pytest.fixture(autouse=True)
def _plain_window(shown: Shown) -> None:
    shown.look()


@pytest.fixture(scope="module")
def plan() -> Deployment:
    return planned(memory=10**9, partition_num=2, pipeline_num=4)


def test_all_parts_are_drawn_and_nothing_fails(shown: Shown, plan: Deployment) -> None:
    shown.open(plan, measured(plan), planned(memory=10**9))
    assert shown.driver.get_log("browser") == []
    assert shown.run("return performance.getEntriesByType('resource').length") == 0, "the page asks a network"
    for part in ("verdict", "costs", "memory", "timeline", "graph", "difference", "operators", "text"):
        assert shown.all(f"#{part} > *:not(h2)"), part
        assert shown.one(f"#{part}").is_displayed(), part
    titles = [each.text.split(",")[0] for each in shown.all("#timeline h3")]
    assert titles == ["predicted", "measured: simulated with the measured forwards and backwards", "predicted"]
    assert re.match(r"Devices 0:\d 1:\d|Devices 0-1:\d", shown.text("#costs p")), shown.text("#costs p")
    assert "transformer" not in shown.text("#graph")
    assert re.search(r"layer\.0\.\.2 × 3", shown.text("#graph")), "equal layers are folded"
    assert "models/net.py:" in shown.text("#graph")
    assert re.search(r"layer\.0\.\.2 × 3 17 operators each; together [\d.]+ \w+FLOP, ", shown.text("#graph"))
    assert shown.text("#operators caption") == "Work and outputs are those of one microbatch"
    assert shown.run(NAMED) == []


@pytest.mark.parametrize("events", [True, False])
def test_the_measured_step_is_the_same_in_card_and_heading(shown: Shown, plan: Deployment, events: bool) -> None:
    shown.open(plan, measured(plan, events=events))
    card = next(each for each in shown.all("#verdict .card") if each.text.startswith("Step, measured"))
    step = card.find_element("css selector", ".large").text
    assert "median of 20 steps, " in card.text
    heading = shown.all("#timeline h3")[1].text
    which = "one recorded step" if events else "simulated with the measured forwards and backwards"
    assert re.fullmatch(rf"measured: {which}, [\d.]+ ms \(the median of 20 steps: {re.escape(step)}\)", heading), (
        heading
    )


def test_names_are_shown_and_never_become_code(shown: Shown, plan: Deployment) -> None:
    attacked = attacking(plan)
    shown.open(attacked, measured(attacked), attacked)
    shown.keys("#search", "img")
    assert shown.driver.title != "taken"
    assert shown.run("return document.images.length") == 0
    assert shown.run("return document.scripts.length") == 2
    assert shown.driver.get_log("browser") == []
    assert ATTACK[:40] in shown.text("#graph")
    assert ATTACK[:40] in shown.text("#text pre")


def test_the_policy_lets_no_other_script_run(shown: Shown, plan: Deployment) -> None:
    """Even if a text became an element."""
    shown.open(plan)
    shown.run(
        "const script = document.createElement('script'); script.textContent = 'document.title = \"taken\"';"
        "document.body.append(script); document.body.insertAdjacentHTML('beforeend', "
        '\'<img src="data:," onerror="document.title = `taken`">\');'
    )
    assert shown.driver.title != "taken"
    assert any("Content Security Policy" in each["message"] for each in shown.driver.get_log("browser"))


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_wide_and_narrow_windows_in_light_and_dark(
    shown: Shown, plan: Deployment, width: int, scheme: str
) -> None:
    shown.look(width, scheme)
    shown.open(plan, measured(plan), planned(memory=10**9))
    assert shown.run("return document.documentElement.scrollWidth") <= width, "something sticks out"
    colors = shown.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map((each) => "
        "each.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0))"
    )
    ground, ink = colors
    assert (ground > ink) == (scheme == "light")
    assert abs(ground - ink) > 400, "it cannot be read"
    # Forwards are drawn in the colour that the legend says, in each timeline.
    for canvas in shown.run(
        "const want = getComputedStyle(document.querySelector('#timeline .legend .c0')).backgroundColor;"
        "const [r, g, b] = want.match(/\\d+/g).map(Number);"
        "return [...document.querySelectorAll('canvas')].map((each) => {"
        "  const all = each.getContext('2d').getImageData(0, 0, each.width, each.height).data; let found = 0;"
        "  for (let at = 0; at < all.length; at += 4) found += all[at] === r && all[at + 1] === g && all[at + 2] === b;"
        "  return found; })"
    ):
        assert canvas > 50


def test_keys_go_through_the_timelines(shown: Shown, plan: Deployment) -> None:
    shown.open(plan, measured(plan, events=True))
    right, down, up = "\ue014", "\ue015", "\ue013"
    told = "#timeline [role=status]"
    shown.keys("canvas", right)
    first = shown.text(told)
    assert re.match(r"predicted: R?\w+\S* \(\w.*\) on 0:0 stage 0, from .* to .*: .*", first), first
    assert shown.one("#timeline .tip").text == first
    shown.keys("canvas", right)
    assert shown.text(told) != first
    shown.keys("canvas", down)
    assert " on 0:1 " in shown.text(told)
    shown.keys("canvas", up)
    assert " on 0:0 " in shown.text(told)
    whole = shown.text("#range")
    shown.keys("canvas", "+", "+")
    assert shown.text("#range") != whole
    shown.keys("canvas", "0")
    assert shown.text("#range") == whole
    shown.keys("#timeline canvas:nth-of-type(2)", right)
    assert shown.text(told).startswith("measured: ")


def test_a_pointer_zooms_and_tells_what_is_below_it(shown: Shown, plan: Deployment) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    shown.open(plan, measured(plan))
    canvas = shown.one("canvas")
    shown.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    told = "#timeline [role=status]"
    before = shown.text(told)
    for across in range(-100, 200, 20):
        ActionChains(shown.driver, duration=0).move_to_element_with_offset(canvas, across, -20).perform()
        if shown.text(told) != before:
            break
    assert re.match(r"predicted: [FBW]\d+ ", shown.text(told)), shown.text(told)
    tip = shown.one("#timeline .tip")
    assert tip.text == shown.text(told)
    below = tip.rect["y"] - canvas.rect["y"]
    assert 0 < below < canvas.rect["height"] + 30, "near the pointer"
    ActionChains(shown.driver, duration=0).move_to_element(shown.one("#timeline h2")).perform()
    assert not tip.is_displayed()
    whole = shown.text("#range")
    shown.one("button[aria-label='Zoom in']").click()
    zoomed = shown.text("#range")
    assert zoomed != whole
    shown.one("button[aria-label='Later']").click()
    assert shown.text("#range") != zoomed
    shown.one("button[aria-label='Whole step']").click()
    assert shown.text("#range") == whole


def test_operators_are_found_and_sorted(shown: Shown, plan: Deployment) -> None:
    shown.open(plan)
    count = sum(len(stage.ops) for stage in plan.stages)
    assert f"{count} of {count} operators" in shown.text("#operators [role=status]")
    shown.keys("#search", "softmax layer.3")
    assert f"1 of {count} operators" in shown.text("#operators [role=status]")
    rows = shown.all("#operators tbody tr")
    assert [each.text for each in rows[0].find_elements("css selector", "td")][2:4] == ["aten::softmax", "layer.3"]
    shown.run("const box = document.querySelector('#search'); box.value = ''; box.dispatchEvent(new Event('input'))")
    work = "#operators th:nth-child(9)"
    shown.keys(f"{work} button", "\ue007")
    assert shown.one(work).get_attribute("aria-sort") == "descending"
    cells = [each.text for each in shown.all("#operators tbody td:nth-child(9)")]
    assert "FLOP" in cells[0]
    assert cells[0] == max(cells, key=lambda text: plain_flops(text))


def plain_flops(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number or 0) * {"": 0, "FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9}[unit]


def test_layers_open_to_their_operators_without_a_pointer(shown: Shown, plan: Deployment) -> None:
    shown.open(plan)
    summaries = "#graph .stage details summary"
    names = [each.text for each in shown.all(summaries)]
    place = next(number for number, name in enumerate(names) if "layer.0..2" in name)
    assert not shown.all("#graph details details table")
    shown.run("document.querySelectorAll(arguments[0])[arguments[1]].focus()", summaries, place)
    shown.driver.switch_to.active_element.send_keys("\ue007")
    rows = "#graph details details[open] tbody tr"
    for _ in range(50):  # toggle is an event of the next frame
        if shown.all(rows):
            break
    assert len(shown.all(rows)) == 17
    assert "aten::layer_norm" in shown.text("#graph details details[open] tbody")


def test_a_diagram_of_four_stages_fits_in_the_window_and_has_no_box_without_an_edge(shown: Shown) -> None:
    plan = planned(memory=10**9, partition_num=4, pipeline_num=4)
    assert plan.planned is not None
    boxes = "return [...document.querySelectorAll('#graph svg rect')].length"
    room = "const s = document.querySelector('#graph .scroll'); return [s.scrollWidth, s.clientWidth]"
    shown.open(plan)
    assert re.match(r"Device 0:\d, stage \d, computes longest", shown.text("#costs p")), shown.text("#costs p")
    assert shown.run(boxes) == 6
    for _ in range(50):  # sizes are observed in the next frame
        if len(set(shown.run(room))) == 1:
            break
    assert len(set(shown.run(room))) == 1
    edges = tuple(each for each in plan.planned.edges if each.dst < 4)
    shown.open(msgspec.structs.replace(plan, planned=msgspec.structs.replace(plan.planned, edges=edges)))
    assert shown.run(boxes) == 5
    shown.look(400)
    scrolled = shown.run(room)
    assert scrolled[0] > 1200 > scrolled[1], "not too small to be read"


def test_ten_thousand_operators_are_drawn(shown: Shown) -> None:
    plan = large()
    shown.open(plan, measured(plan))
    assert shown.driver.get_log("browser") == []
    assert "10,000 of 10,000 operators, 100 shown" in shown.text("#operators [role=status]")
    shown.keys("#search", "head")
    assert "1 of 10,000" in shown.text("#operators [role=status]")
