"""Fixtures of the browser tests: one cluster with traffic, one console, one browser."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright

from penstock.console.pipeline_runs import PipelineRun, RunBatch, RunRecorder

from .browser_kit import WAIT_MS, chromium, open_browser
from .console_page import ConsolePage
from .servers import Program, start_cluster, start_console
from .traffic import Traffic

__all__ = ["Browser", "Playwright"]

Open = Callable[..., ConsolePage]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium; without it the tests are skipped, except on CI."""
    path = chromium()
    if path is None:
        message = "needs Chromium on the PATH (apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with open_browser(path) as found:
        yield found


@pytest.fixture(scope="session")
def cluster(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Program, str]]:
    """A NameServer and two brokers."""
    env = {"PENSTOCK_BROKER_TRANSACTION_CHECK_MS": "3000"}
    program, nameserver = start_cluster(tmp_path_factory.mktemp("cluster"), "--brokers", 2, env=env)
    yield program, nameserver
    program.stop()


@pytest.fixture(scope="session")
def traffic(cluster: tuple[Program, str]) -> Iterator[Traffic]:
    """Producers and consumers."""
    found = Traffic(cluster[1], rate=15.0)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def url(
    cluster: tuple[Program, str], traffic: Traffic, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a console without logins."""
    runs = tmp_path_factory.mktemp("runs")
    record_run(runs)
    program, address = start_console(
        cluster[1], tmp_path_factory.mktemp("console"), "--pipelines", runs
    )
    yield address
    assert program.stop() == 0, "".join(program.heard)
    assert "Traceback" not in "".join(program.heard), "".join(program.heard)


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Open]:
    """Opens a page of the console in a new context. Errors of its scripts fail the test."""
    contexts = []
    problems: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        # Other programs on the machine may add network interfaces at any time.
        expected = ("status of 4", "ERR_NETWORK_CHANGED")
        if message.type == "error" and not any(text in message.text for text in expected):
            problems.append(message.text)

    def open_page(
        path: str, *, at: str = url, width: int = 1280, theme: str = "light"
    ) -> ConsolePage:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if theme == "dark" else "light",
            accept_downloads=True,
        )
        contexts.append(context)
        page: Page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        return ConsolePage(page, at).open(path)

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def record_run(directory: Path) -> None:
    """The record of a pipeline that runs since 24 minutes and some seconds."""
    began_ms = time.time_ns() // 1_000_000 - 24 * 60_000 - 9_000
    recorder = RunRecorder(
        directory,
        PipelineRun(
            id="4f2a11c0", pipeline="lake", options={"topics": "orders", "lake": "/data/lake"},
            nameserver="127.0.0.1:9876", pid=os.getpid(), host="spark-1",
            started_ms=began_ms, updated_ms=began_ms,
        ),
    )  # fmt: skip
    for number in range(24):
        rows = 40_000 + number * 7_919 % 23_000
        at_ms = began_ms + (number + 1) * 60_000
        recorder.batch(RunBatch(at_ms, "", number, rows, 1.9 + number % 5 * 0.1, 120))
