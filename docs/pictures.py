"""The pictures of the documentation, from the simulator itself: ``python docs/pictures.py``, where
chromium is."""

from __future__ import annotations

import html
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from argosy.cluster.file import cluster_from_content
from argosy.plan.file import load_plan
from argosy.planner import find_plan
from argosy.report.page import Report
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.timeline import SpanKind, Timeline
from argosy.workload.load import load_model

FOLDER = Path(__file__).parent / "pictures"
WIDTH, ROW, MARGIN = 900, 16, 90
PHOTOGRAPHED = 1182
"""Pixels of the page, from its top to the end of the timeline."""
COLOURS = {SpanKind.FORWARD: "#3b82c4", SpanKind.BACKWARD: "#e0912f", SpanKind.UPDATE: "#8a5cb8"}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    plan = load_plan("llama-3-8b-on-mixed-16")
    cluster = cluster_from_content(plan.cluster.content)
    ref = plan.model
    chain = load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )
    slow = replace(
        cluster,
        links=tuple(
            replace(link, bandwidth=link.bandwidth.scaled(0.16)) if "v0.nic" in link.name else link
            for link in cluster.links
        ),
    )
    charts = []
    for k in (1, 4):
        spec = (
            replace(plan.schedule, kind=ScheduleKind.KFKB, k=k)
            if k > 1
            else ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
        )
        played = simulate(replace(plan, schedule=spec), chain, slow, iterations=1)
        charts.append((f"k = {k}", played))
    (FOLDER / "kfkb.svg").write_text(_chart(charts), encoding="utf-8")
    found = find_plan(chain, cluster, global_batch=plan.global_batch)
    (FOLDER / "report.png").write_bytes(
        _photographed(Report(plan=found, chain=chain, cluster=cluster))
    )


def _photographed(report: Report) -> bytes:
    """The upper part of a page, by a browser."""
    from selenium import webdriver

    options, driver = (
        webdriver.ChromeOptions(),
        webdriver.ChromeService(executable_path=shutil.which("chromedriver")),
    )
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    with (
        tempfile.TemporaryDirectory() as folder,
        webdriver.Chrome(options=options, service=driver) as browser,
    ):
        screen = {"width": 1080, "height": PHOTOGRAPHED, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(report.save(Path(folder) / "report.html").as_uri())
        picture: bytes = browser.get_screenshot_as_png()
    return picture


def _chart(charts: list[tuple[str, Timeline]]) -> str:
    """One block of rows per timeline, a row per first device of a stage, all on one time axis."""
    longest = max(timeline.iteration_ends[-1] for _, timeline in charts)
    parts, y = [], 24
    for title, timeline in charts:
        seconds = timeline.iteration_ends[-1]
        parts.append(
            f'<text x="{MARGIN}" y="{y}" font-weight="bold">{html.escape(title)}: {seconds:.2f} s</text>'
        )
        y += 8
        stages = sorted({span.stage for span in timeline.spans if span.stage is not None})
        for stage in stages:
            spans = [s for s in timeline.spans if s.stage == stage and s.kind in COLOURS]
            device = spans[0].where
            parts.append(
                f'<text x="{MARGIN - 8}" y="{y + 12}" text-anchor="end">stage {stage}</text>'
            )
            parts.append(
                f'<rect x="{MARGIN}" y="{y}" width="{WIDTH}" height="{ROW - 3}" fill="#88888818"/>'
            )
            for span in spans:
                if span.where == device:
                    x, width = MARGIN + span.start / longest * WIDTH, span.seconds / longest * WIDTH
                    colour = COLOURS[span.kind]
                    size = f'width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 3}"'
                    parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{colour}"/>')
            y += ROW
        y += 24
    legend = "".join(
        f'<rect x="{MARGIN + 130 * i}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{MARGIN + 130 * i + 18}" y="{y}">{kind.value}</text>'
        for i, (kind, colour) in enumerate(COLOURS.items())
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + MARGIN + 10} {y + 12}" role="img"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#777"'
    return f"{head} {style}>\n" + "\n".join(parts) + legend + "\n</svg>\n"


if __name__ == "__main__":
    main()
