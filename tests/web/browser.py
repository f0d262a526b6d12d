"""Debian's Chromium under Playwright, in a profile of its own, with what its console said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    """Skips the test where there is none; in CI that is a failure."""
    path = shutil.which("chromium")
    if path is None:
        reason = "no chromium on this machine (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@contextmanager
def browser_page(
    profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[tuple[Page, list[str]]]:
    """A page, and the list to which errors of its console and scripts are added."""
    path = chromium()
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=path,
            args=list(FLAGS),
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        try:
            page, errors = context.pages[0], list[str]()
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.set_default_timeout(30_000)
            yield page, errors
        finally:
            context.close()
