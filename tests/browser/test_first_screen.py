"""The demo's first screen as a person sees it: TensorBoard's own page in a real browser.

Nothing is asked of TensorBoard but what it drew: titles, legends, the lines' vertices and the tooltip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from megatron_probes.catalog import first_screen_charts, lookup
from megatron_probes.sinks import SHOW_EVERY_POINT, read_records, read_series

pytestmark = [pytest.mark.browser, pytest.mark.megatron, pytest.mark.slow]

WAIT_S = 120
SCREENSHOTS = "MEGATRON_PROBES_SCREENSHOTS"
"""Environment variable: a folder that keeps the pictures."""

# The page is built of nested shadow roots.
FIND = """
const find = (root, selector, found = []) => {
  for (const element of root.querySelectorAll('*')) {
    if (element.matches(selector)) found.push(element);
    if (element.shadowRoot) find(element.shadowRoot, selector, found);
  }
  return found;
};
"""

CHARTS = """
return find(document, 'tf-custom-scalar-multi-line-chart-card').map(card => ({
  title: find(card.shadowRoot, 'figcaption')[0]?.innerText.trim(),
  curves: find(card.shadowRoot, '.match-list-entry').map(entry => entry.textContent),
  lines: find(card.shadowRoot, 'path.line')
    .map(path => path.getAttribute('d')).filter(Boolean),
  plot: find(card.shadowRoot, '.component-group.main')[0]?.getBoundingClientRect().toJSON(),
}));
"""


@dataclass(frozen=True)
class Chart:
    """What one chart shows; a vertex is in pixels from the plot's upper left corner."""

    title: str
    tags: list[str]
    lines: list[list[tuple[float, float]]]
    width: float
    height: float


@pytest.fixture(scope="module")
def tensorboard(demo_run) -> Iterator[str]:
    """Address of a TensorBoard that serves the demo's run and has loaded it."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", demo_run.folder / "by_step"]
    command += ["--host", "127.0.0.1", "--port", "0", *SHOW_EVERY_POINT.split()]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        for line in server.stderr:
            if found := re.search(r"at (http://127\.0\.0\.1:\d+)", line):
                address = found.group(1)
                break
        assert address, "TensorBoard ended without an address"
        deadline = time.monotonic() + WAIT_S
        while not _has_loaded(address, demo_run.steps):
            assert time.monotonic() < deadline, "TensorBoard did not load the run"
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def _has_loaded(address, steps):
    with urllib.request.urlopen(f"{address}/data/plugin/scalars/tags") as answer:
        runs = json.load(answer)
    if "loss/global" not in runs.get(".", {}):
        return False
    with urllib.request.urlopen(f"{address}/data/plugin/scalars/scalars?run=.&tag=loss/global") as answer:
        return len(json.load(answer)) == steps


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Folder of the screenshots."""
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def page(browser, tensorboard, demo_run, pictures):
    """The browser on the Custom Scalars page, all charts drawn as TensorBoard draws them by default."""
    expected = len(_expected(demo_run))
    browser.get(f"{tensorboard}/#custom_scalars")
    _wait_for_charts(
        browser, lambda charts: len(charts) == expected and all(c.lines for c in charts), pictures
    )
    return browser


@pytest.fixture(scope="module")
def raw_page(page, pictures):
    """The same without smoothing and without cutting outliers off: each point stands where it is."""
    _save(page, pictures / "first_screen.png")
    smoothing = page.execute_script(FIND + "return find(document, 'input[type=number]')[0]")
    smoothing.click()
    smoothing.send_keys(Keys.CONTROL, "a")
    smoothing.send_keys("0", Keys.ENTER)
    outliers = page.execute_script(
        FIND + "return find(document, 'paper-checkbox').find(box => box.textContent.includes('outliers'))"
    )
    assert outliers.get_attribute("checked"), "TensorBoard cuts outliers off unless told otherwise"
    outliers.click()
    _wait_for_charts(page, lambda charts: all(len(c.lines) == len(c.tags) for c in charts), pictures)
    # A chart that was drawn while both settings changed keeps its old range.
    for button in page.execute_script(FIND + "return find(document, '[title=\"Fit domain to data\"]')"):
        button.click()
    _wait_for_charts(page, lambda charts: all(map(_is_inside, charts)), pictures)
    _save(page, pictures / "first_screen_raw.png")
    return page


def _wait_for_charts(page, condition, pictures):
    try:
        WebDriverWait(page, WAIT_S).until(lambda driver: condition(_charts(driver)))
    except TimeoutException:
        _save(page, pictures / "first_screen_failed.png")
        raise


def _is_inside(chart):
    return all(0 <= y <= chart.height for line in chart.lines for _, y in line)


def _save(page, picture):
    page.save_screenshot(str(picture))
    assert picture.stat().st_size > 50_000, "an empty page makes a small picture"


def _expected(demo_run):
    """(title, tags that the record holds) of each chart of the first screen, in reading order."""
    recorded = {tag for record in read_records(demo_run.folder) for tag in record.values}
    expected = []
    for chart in first_screen_charts():
        tags = {tag for tag in recorded if lookup(tag).tag in chart.tags}
        if tags:
            expected.append((chart.title, tags))
    return expected


def _charts(page):
    return [
        Chart(
            title=card["title"],
            tags=[re.search(r"(\S+) \(\.\)", curve).group(1) for curve in card["curves"]],
            lines=[_vertices(path) for path in card["lines"]],
            width=card["plot"]["width"],
            height=card["plot"]["height"],
        )
        for card in page.execute_script(FIND + CHARTS)
        if card["plot"]  # else it is not built yet
    ]


def _vertices(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path)]


def _line_of(chart, tag, values):
    """The line of `tag`, told from the others by its shape: higher values lie higher on the screen."""

    def distance(line):
        drawn = [y for _, y in line]
        scale = (max(drawn) - min(drawn)) / (max(values) - min(values))
        return max(
            abs(y - (max(drawn) - scale * (value - min(values))))
            for y, value in zip(drawn, values, strict=True)
        )

    candidates = [line for line in chart.lines if len(line) == len(values)]
    best = min(candidates, key=distance)
    assert distance(best) < 1.0, f"no line of {chart.title} has the shape of {tag}"
    return best


def test_the_charts_stand_in_the_order_of_the_first_screen(page, demo_run):
    assert [chart.title for chart in _charts(page)] == [title for title, _ in _expected(demo_run)]


def test_every_chart_shows_the_tags_of_the_record(page, demo_run):
    for chart, (title, tags) in zip(_charts(page), _expected(demo_run), strict=True):
        assert {*chart.tags} == tags, title
        assert len(chart.tags) == len(tags), title


def test_every_point_of_the_loss_is_drawn(raw_page, demo_run):
    steps, loss = read_series(demo_run.folder, "loss/global")
    chart = next(chart for chart in _charts(raw_page) if chart.title.startswith("Loss: global"))
    line = _line_of(chart, "loss/global", loss)
    assert len(line) == demo_run.steps
    spacing = (line[-1][0] - line[0][0]) / (steps[-1] - steps[0])
    assert [x for x, _ in line] == pytest.approx(
        [line[0][0] + spacing * (step - 1) for step in steps], abs=0.5
    )


@pytest.mark.parametrize(
    ("title", "tag"), [("Loss: global and worst rank", "loss/global"), ("Gradient norm", "grad/norm")]
)
def test_the_injected_spike_is_drawn(raw_page, demo_run, title, tag):
    _, values = read_series(demo_run.folder, tag)
    chart = next(chart for chart in _charts(raw_page) if chart.title == title)
    line = _line_of(chart, tag, values)
    at = demo_run.anomaly_step - 1
    x, y = line[at]
    assert 0 <= x <= chart.width
    assert 0 <= y <= chart.height
    late = [y for i, (_, y) in enumerate(line) if i >= demo_run.steps // 2 and i != at]
    assert y < min(late) - chart.height / 4, "it stands out by a quarter of the chart"


def test_the_joint_spike_steps_up_at_the_anomaly(raw_page, demo_run):
    _, counts = read_series(demo_run.folder, "stability/joint_spike")
    chart = next(chart for chart in _charts(raw_page) if chart.title == "Joint spikes")
    _, magnitudes = read_series(demo_run.folder, "stability/joint_spike_magnitude")
    rising = [step for step in range(1, len(counts)) if counts[step] != counts[step - 1]]
    assert rising == [demo_run.anomaly_step - 1]
    drawn = [line for line in chart.lines if len(line) == len(counts)]
    assert len(drawn) == 2, "the count and its magnitude"
    for line in drawn:
        steps_up = [i for i in range(1, len(line)) if line[i][1] < line[i - 1][1] - 1]
        assert steps_up == rising
    assert magnitudes[-1] > 8


def test_the_tooltip_names_step_and_value_of_the_spike(raw_page, demo_run):
    _, values = read_series(demo_run.folder, "loss/global")
    index, chart = next(
        (index, chart)
        for index, chart in enumerate(_charts(raw_page))
        if chart.title.startswith("Loss: global")
    )
    x, y = _line_of(chart, "loss/global", values)[demo_run.anomaly_step - 1]
    plot = raw_page.execute_script(
        FIND + "const card = find(document, 'tf-custom-scalar-multi-line-chart-card')[arguments[0]];"
        "return find(card.shadowRoot, '.component-group.main')[0]",
        index,
    )
    rows = []
    for nudge in (0, 1, -1, 2, -2):  # the pointer stands on whole pixels, and a step is little wider than one
        # The driver measures from the element's centre.
        offset = round(x - chart.width / 2) + nudge, round(y - chart.height / 2)
        ActionChains(raw_page).move_to_element_with_offset(plot, *offset).perform()
        rows += WebDriverWait(raw_page, WAIT_S).until(_tooltip)
    row = next(row for row in rows if str(demo_run.anomaly_step) in row)
    value = values[demo_run.anomaly_step - 1]
    assert any(_is_number(cell) and float(cell) == pytest.approx(value, rel=1e-3) for cell in row), row


def _tooltip(page):
    """Cells of the tooltip's rows about the global loss, empty while there is no tooltip."""
    return page.execute_script(
        FIND + "return find(document, 'tbody tr')"
        ".filter(row => row.offsetParent !== null)"
        ".map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent.trim()))"
        ".filter(cells => cells.some(cell => cell.startsWith('loss/global')))"
    )


def _is_number(text):
    return re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text) is not None
