"""The page in a real browser: headless Chromium opens it, a script clicks, and what it finds is read from the page."""

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
CLICKS = """
<script>
const board = document.querySelector(".board[data-name=full]");
const visible = (element) => element.getClientRects().length > 0;
const layers = () => [...board.querySelectorAll("tbody tr")].filter(visible).map((row) => row.dataset.layer);
const header = (key) => board.querySelector(`th[data-key="${key}"] button`);
const set = (name, value) => {
  const field = board.querySelector(`.filters [name="${name}"]`);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const found = {};

// Sorting: best first, then the other way round; a metric sorts again.
header("parity").click();
found.best = layers();
header("parity").click();
found.worst = layers();
header("copying").click();
found.missing_last = layers()[0];
header("memorization").click();

// The metric.
const shown = () => [...board.querySelectorAll('td[data-task="parity"] .sequence')].some(visible);
found.token_first = !shown();
document.querySelector("[name=metric][value=sequence]").click();
found.sequence_then = shown();

// Filters.
set("family", "delta rule");
found.family = layers();
set("family", "");
set("text", "trans");
found.text = layers();
set("text", "");
set("parameters", "1");
found.parameters = layers();
set("parameters", "");
set("state", "grows");
found.state = layers().length;
set("state", "");
const box = board.querySelector('[name="task"][value="parity"]');
box.click();
found.task_hidden = !visible(header("parity"));
box.click();

// Details of a cell, by focus and by click.
const link = board.querySelector('tr[data-layer="rt"] td[data-task="parity"] a');
link.focus();
found.tip = document.querySelector("#tip").textContent;
link.click();
found.kept = visible(document.querySelector("#tip code"));

found.wider_than_page = document.documentElement.scrollWidth > innerWidth;
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


@pytest.fixture
def found(pages: Path, tmp_path: Path) -> tuple[dict[str, object], str]:
    """What the script has found on the page at the width of a phone, and the browser's log."""
    clicked = tmp_path / "index.html"
    clicked.write_text((pages / "index.html").read_text().replace("</body>", CLICKS + "</body>"))
    words = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --window-size=500,900 --dump-dom"
    command = [str(CHROMIUM), *words.split(), f"--user-data-dir={tmp_path / 'profile'}", clicked.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text = done.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    return json.loads(unescape(text)), done.stderr


def test_the_page_sorts_filters_switches_and_logs_nothing(found: tuple[dict[str, object], str]) -> None:
    seen, log = found
    assert "CONSOLE" not in log
    tip = str(seen.pop("tip"))
    assert "rt on parity" in tip
    assert "0.9250 (0." in tip
    assert "python -m runners.mad.reference --layers rt --tasks parity" in tip
    assert seen == {
        "best": ["rt-block-4", "transformer+rt", "rt", "my_layer:MyLayer", "deltanet", "transformer"],
        "worst": ["transformer", "deltanet", "my_layer:MyLayer", "rt", "rt-block-4", "transformer+rt"],
        "missing_last": "rt-block-4",
        "token_first": True,
        "sequence_then": True,
        "family": ["deltanet"],
        "text": ["transformer+rt", "transformer"],
        "parameters": [],
        "state": 6,
        "task_hidden": True,
        "kept": True,
        "wider_than_page": False,
    }
