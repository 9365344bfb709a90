"""The pages in headless Chromium: none is wider than a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from runners.report.__main__ import PAGES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
PHONE = """<body><script>
onload = () => document.body.append(
  [...document.querySelectorAll("iframe")].map((page) => page.contentDocument.documentElement.scrollWidth).join(" "))
</script>"""


def test_no_page_is_wider_than_a_phone(pages: Path, tmp_path: Path) -> None:
    frames = [f'<iframe src="{(pages / name).as_uri()}.html" style="width:420px;border:0"></iframe>' for name in PAGES]
    phone = tmp_path / "phone.html"
    phone.write_text(PHONE + "".join(frames))
    words = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --dump-dom"
    command = [str(CHROMIUM), *words.split(), f"--user-data-dir={tmp_path / 'user'}", phone.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    widths = done.stdout.rpartition("</iframe>")[2].partition("</body>")[0].split()
    assert len(widths) == len(PAGES)
    assert all(int(width) <= 420 for width in widths)
