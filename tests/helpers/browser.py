"""A headless Chromium, as `make test-long` unpacks it, and the page in it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / ".cache/browser"
ENVIRONMENT = {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}


@contextmanager
def browser() -> Iterator[Any]:
    """playwright's Browser."""
    assert FOLDER.is_dir(), "run `make test-long`, which makes it"
    sys.path.append(str(FOLDER / "python"))  # it is in no environment
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=FOLDER / "chromium", env={**os.environ, **ENVIRONMENT}, chromium_sandbox=False
        )
        yield chromium
        chromium.close()


@contextmanager
def opened(chromium: Any, address: str, **context: Any) -> Iterator[Any]:
    """playwright's Page at an address. Nothing may go wrong in it: no exception, no violation of its policy.

    Args:
        context: as Browser.new_context has it.
    """
    with chromium.new_context(**context) as made:
        page = made.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(address)
        yield page
        expected = "Failed to load resource: "  # whose status, or absence, the page itself shows
        found = [problem for problem in problems if not problem.startswith(expected)]
        assert not found, found
