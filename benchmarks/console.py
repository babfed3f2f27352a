"""The web console with many topics and groups: page loads in Chromium, memory, CPU at rest.

    python -m benchmarks.console [TOPICS [GROUPS]]

A load ends when the browser has laid out the figures or the first row. A first load is that of a
new browser profile; the later loads follow each other in the same profile. Chromium is on the PATH.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx
from playwright.sync_api import Browser, Page
from rich.console import Console
from rich.table import Table
from tests.browser.browser_kit import chromium, open_browser
from tests.browser.servers import Program, start_cluster, start_console

from benchmarks.many_topics import cpu_seconds, frames, send_all
from penstock import AsyncAdmin
from penstock.wire.codes import RequestCode

TOPICS, GROUPS = 10_000, 2_000
FIRST_LOADS, LATER_LOADS = 3, 20
REST_S = 75.0
"""After this time without requests the console reads only what its charts need."""
CPU_S = 30.0
REST_CPU_S = 180.0
"""Long enough for three of the reads that the console makes once a minute at rest."""
PAGES = {
    "Home": ("/", "main .stat .value"),
    "Topics": ("/topics", "main tbody tr"),
    "Groups": ("/groups", "main tbody tr"),
}
_MARK = """
addEventListener("DOMContentLoaded", () => {
  const seen = () => {
    if (!document.querySelector(SELECTOR)) return;
    observer.disconnect();
    document.body.getBoundingClientRect();
    window.loadedMs = performance.now();
    document.documentElement.dataset.loaded = "";
  };
  const observer = new MutationObserver(seen);
  observer.observe(document.body, { childList: true, subtree: true });
});
"""


async def create_groups(nameserver: str, count: int, topics: int) -> None:
    """Groups, each with an offset of one topic."""
    async with AsyncAdmin(nameserver) as admin:
        [broker] = await admin.masters()

        async def create(number: int) -> None:
            group = f"group-{number:06d}"
            await admin.create_group(group)
            fields = {
                "consumerGroup": group, "topic": f"topic-{number % topics:06d}", "queueId": "0",
                "commitOffset": "1",
            }  # fmt: skip
            await admin.ask(broker.address, RequestCode.UPDATE_CONSUMER_OFFSET, fields)

        await admin.for_each(range(count), create)


def load_ms(page: Page, url: str) -> float:
    """Milliseconds from the start of the navigation until the page can be used."""
    page.goto(url)
    page.wait_for_selector("html[data-loaded]")
    return float(page.evaluate("window.loadedMs"))


def loads(browser: Browser, url: str, selector: str) -> Iterator[tuple[float, list[float]]]:
    """First load and later loads, in some new profiles."""
    for _ in range(FIRST_LOADS):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_init_script(_MARK.replace("SELECTOR", repr(selector)))
        page = context.new_page()
        first = load_ms(page, url)
        yield first, [load_ms(page, url) for _ in range(LATER_LOADS)]
        context.close()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def cpu_percent(pid: int, seconds: float = CPU_S) -> float:
    before, began = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)


def measure(browser: Browser, console: Program, url: str, title: str) -> None:
    table = Table(title=title)
    for column in ("page", "first p50 ms", "first max", "later p50 ms", "later max", "API ms"):
        table.add_column(column, justify="right")
    for name, (path, selector) in PAGES.items():
        found = list(loads(browser, url + path, selector))
        first = [one for one, _ in found]
        later = [ms for _, many in found for ms in many]
        api = api_ms(url, name.lower().replace("home", "overview"))
        table.add_row(
            name,
            *(f"{value:.0f}" for value in (median(first), max(first), median(later), max(later))),
            f"{api:.1f}",
        )
    Console().print(table)
    pid = console.process.pid
    print(f"memory after the loads: {resident_mib(pid):.0f} MiB resident")
    page = browser.new_page()
    page.goto(url + "/topics")
    print(f"CPU with one page open: {cpu_percent(pid):.1f} % of a core")
    page.close()
    time.sleep(REST_S)
    print(f"CPU at rest: {cpu_percent(pid, REST_CPU_S):.1f} % of a core")
    print(f"memory at rest: {resident_mib(pid):.0f} MiB resident")


def api_ms(url: str, name: str) -> float:
    """The median time of the request of a page, without a browser."""
    times = []
    with httpx.Client(base_url=url) as client:
        for _ in range(LATER_LOADS):
            began = time.perf_counter()
            client.get(f"/api/{name}").raise_for_status()
            times.append(1000 * (time.perf_counter() - began))
    return median(times)


def await_measured(url: str, topics: int, groups: int) -> None:
    """Wait until the console has the tables, and the figures of the first rows."""
    with httpx.Client(base_url=url) as client:
        while True:
            found = client.get("/api/topics").json(), client.get("/api/groups").json()
            if found[0]["measured"] >= topics and found[1]["measured"] >= groups:
                return
            time.sleep(1)


def main(topics: int = TOPICS, groups: int = GROUPS) -> None:
    path = chromium()
    if path is None:
        print("console: needs Chromium on the PATH")
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as data:
        names = ("TOPICS_MAX", "AUTO_CREATIONS_MAX", "GROUPS_MAX")
        limits = {f"PENSTOCK_BROKER_{name}": str(topics + groups + 1_000) for name in names}
        cluster, nameserver = start_cluster(Path(data) / "cluster", env=limits)
        console, url = start_console(nameserver, Path(data) / "console", "--interval", 5)
        try:
            port = int(nameserver.rpartition(":")[2]) + 10
            send_all(port, frames(topics, 1, 1))
            asyncio.run(create_groups(nameserver, groups, topics))
            await_measured(url, min(topics, 400), min(groups, 100))
            with open_browser(path) as browser:
                measure(browser, console, url, f"console, {topics:,} topics, {groups:,} groups")
        finally:
            console.stop()
            cluster.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
