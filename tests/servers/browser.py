"""A headless Chromium for what a user sees and clicks in the Dagster UI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.servers.s3 import skip_unless_ci

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZE = {"width": 1200, "height": 750}
PATIENCE = 240_000  # milliseconds


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of Chromium or Google Chrome; skipped where neither is installed, unless CI is set."""
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if found is None:
        skip_unless_ci(
            "There is no Chromium: install it (Debian, Ubuntu: apt install chromium"
            " fonts-dejavu-core)."
        )
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    # Chromium has no sandbox for root, and containers have a small /dev/shm.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=found, args=arguments) as browser,
    ):
        # A time zone of its own: the UI shows times, and screenshots must not depend on where they
        # are taken.
        page = browser.new_page(viewport=SIZE, timezone_id="UTC", locale="en-GB")
        page.set_default_timeout(PATIENCE)
        yield page


def keep_screenshot(page: Page, name: str) -> None:
    """Store what the page shows in the folder that ADJUNCT_SCREENSHOTS names, if it does."""
    folder = os.environ.get("ADJUNCT_SCREENSHOTS")
    if folder:
        from io import BytesIO
        from pathlib import Path

        from PIL import Image

        page.mouse.move(0, 0)
        picture = Image.open(BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
        picture.quantize(128).save(Path(folder) / f"{name}.png", optimize=True)
