"""The report in a real browser: it draws, zooms, answers to keys, and says what is under the pointer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.cluster.file import cluster_from_content
from argosy.plan.file import load_plan
from argosy.report.page import Picture, report_page
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = load_plan("llama-3-8b-on-mixed-16")
    cluster, ref = cluster_from_content(plan.cluster.content), plan.model
    chain = load_model(ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer)
    timeline = simulate(plan, chain, cluster)
    pictures = [Picture(label="first", timeline=timeline), Picture(label="second", timeline=timeline)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_page(plan, cluster, pictures), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    return browser


def text(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def test_it_draws_without_complaints(opened: Any) -> None:
    script = (
        "const c = document.getElementById('canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const seen = new Set();"
        "for (let i = 0; i < d.length; i += 400) seen.add(d[i] * 65536 + d[i+1] * 256 + d[i+2]);"
        "return seen.size"
    )
    assert opened.execute_script(script) > 3
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_buttons_zoom_and_show_everything_again(opened: Any) -> None:
    whole = text(opened, "window")
    opened.find_element("id", "zoom-in").click()
    opened.find_element("id", "zoom-in").click()
    opened.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert text(opened, "window") != whole
    opened.find_element("id", "reset").click()
    opened.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert text(opened, "window") == whole


def test_the_keyboard_steps_through_what_a_device_does(opened: Any) -> None:
    canvas = opened.find_element("id", "canvas")
    canvas.send_keys("]")
    assert text(opened, "spoken").startswith("a0.0 (A100-80GB): forward of micro-batch 0, 0 us to")
    canvas.send_keys("]")
    assert "forward of micro-batch 1" in text(opened, "spoken")


def test_the_pointer_is_told_what_it_is_over(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    canvas = opened.find_element("id", "canvas")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    left, top = -canvas.size["width"] / 2, -canvas.size["height"] / 2
    ActionChains(opened).move_to_element_with_offset(canvas, int(left + 135), int(top + 34)).perform()
    assert "forward of micro-batch 0" in opened.find_element("id", "tip").text


def test_memory_links_and_other_timelines_can_be_shown(opened: Any) -> None:
    def height() -> int:
        return int(opened.find_element("id", "canvas").size["height"])

    alone = height()
    opened.find_element("id", "show-memory").click()
    with_memory = height()
    opened.find_element("id", "show-links").click()
    assert alone < with_memory < height()
    opened.execute_script(
        "const s = document.getElementById('picture'); s.value = '1'; s.dispatchEvent(new Event('change'))"
    )
    assert height() > with_memory


def test_a_phone_shows_it_without_scrolling_sideways(opened: Any) -> None:
    opened.set_window_size(420, 800)
    try:
        script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        wide, room = opened.execute_script(script)
        assert wide <= room
    finally:
        opened.set_window_size(1200, 900)
