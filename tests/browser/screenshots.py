"""Takes the screenshots of the documentation: `python -m tests.browser.screenshots [PAGE …]`.

Each page in light and dark, wide and narrow, of a live cluster with traffic, as PNG files with a
palette in docs/images.
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, StorageState

from .browser_kit import WAIT_MS, chromium, open_browser
from .conftest import record_run
from .console_page import ConsolePage
from .servers import (
    ACCESS,
    SUPER,
    Program,
    kill_broker,
    start_cluster,
    start_console,
    taken_port,
)
from .traffic import Traffic

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
WARM_UP_S = 75.0
"""How long there is traffic before the first screenshot, so that charts have a line."""
FAILOVER_MS = 60_000
COLOURS = 256
RULES = (
    ("billing", "Topic:orders", ["Sub"]),
    ("billing", "Group:billing", ["Sub"]),
    ("shop", "Topic:orders", ["Pub"]),
    ("shop", "Topic:payments", ["Pub"]),
    ("support", "Topic:*", ["Sub", "Get", "List"]),
)
"""Users of the brokers with their rules."""


def pages(traffic: Traffic) -> dict[str, tuple[str, str]]:
    """Name → path and the selector that must be visible."""
    found = traffic.call(traffic.admin.messages_by_key("orders", "ORD-10042"))[0]
    place = f"{found.queue.topic}/{found.broker_name}/{found.queue_id}/{found.queue_offset}"
    return {
        "home": ("/", "main .chart .line"),
        "topics": ("/topics", "text=stock-levels"),
        "topic": ("/topics/orders", "text=billing"),
        "messages": ("/messages?topic=orders", "main tbody tr"),
        "message": (f"/message/{place}", "#verdicts .badge"),
        "groups": ("/groups", "text=analytics"),
        "group": ("/groups/analytics", "#queues tbody tr"),
        "dead-letters": ("/dead-letters/mailer", "main tbody tr"),
        "scheduled": ("/scheduled", "main tbody tr"),
        "transactions": ("/transactions", "main tbody tr"),
        "pipelines": ("/pipelines", "main .panel"),
        "cluster": ("/cluster", "#elections tbody tr"),
    }


def main() -> None:
    wanted = sys.argv[1:]
    path = chromium()
    assert path is not None, "install chromium"
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, open_browser(path) as browser:
        cluster, nameserver = start_cluster(Path(data) / "cluster", "--replicas", 3)
        runs = Path(data) / "runs"
        record_run(runs)
        console, url = start_console(nameserver, Path(data) / "console", "--pipelines", runs)
        traffic = Traffic(nameserver)
        try:
            if not wanted or {"login", "access"} & set(wanted):
                take_access(browser, Path(data))
            if wanted and set(wanted) <= {"login", "access"}:
                return
            traffic.start()
            watching = browser.new_page()  # the console measures groups while somebody looks
            watching.goto(url)
            watching.wait_for_timeout(1000 * (WARM_UP_S if not wanted or "home" in wanted else 8))
            watching.close()
            for name, (page, ready) in pages(traffic).items():
                if name == "cluster" and (not wanted or name in wanted):
                    take_failover(browser, cluster, url, traffic)
                elif not wanted or name in wanted:
                    take(browser, url + page, ready, name)
        finally:
            traffic.stop()
            console.stop()
            cluster.stop()


def take_failover(browser: Browser, cluster: Program, url: str, traffic: Traffic) -> None:
    """The page Cluster after the master was killed, while it can't start again."""
    [master] = traffic.call(traffic.admin.masters())
    port = int(master.address.rpartition(":")[2])
    kill_broker(cluster, port)
    with taken_port(port):
        page = browser.new_page()
        page.goto(f"{url}/cluster")
        page.wait_for_selector("#elections tbody tr >> nth=1", timeout=FAILOVER_MS)
        page.wait_for_selector("tr:has-text('in sync') .badge", timeout=FAILOVER_MS)
        page.close()
        take(browser, f"{url}/cluster", ".badge:text-is('down')", "cluster")


def take_access(browser: Browser, data: Path) -> None:
    """The login, and the users and rules of brokers with access control."""
    servers, nameserver = start_cluster(data / "secured", env=ACCESS)
    console, url = start_console(
        nameserver, data / "secured-console", "--logins", "brokers", env=SUPER
    )
    try:
        take(browser, url, ".login form", "login")
        context = browser.new_context()
        page = ConsolePage(context.new_page(), url).open("/access")
        page.log_in("root", "root-password")
        page.expect("Users of the brokers")
        for user, resource, actions in RULES:
            page.call("PUT", f"/access/users/{user}", {"password": "a-password", "super": False})
            rule = {"resource": resource, "actions": actions, "decision": "Allow"}
            page.call("PUT", f"/access/users/{user}/rules", rule)
        take(browser, f"{url}/access", "tr[data-key=support]", "access", context.storage_state())
        context.close()
    finally:
        console.stop()
        servers.stop()


def take(
    browser: Browser, url: str, ready: str, name: str, state: StorageState | None = None
) -> None:
    """Four screenshots of one page. `state` has the cookie of a session."""
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if theme == "dark" else "light",
                storage_state=state,
            )
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector(ready, timeout=WAIT_MS)
            page.wait_for_selector("main[data-page], .login form")
            page.wait_for_timeout(700)  # figures that arrive after the page
            save(page, IMAGES / f"{name}-{size}-{theme}.png")
            context.close()


def save(page: Page, path: Path) -> None:
    """Write a PNG with the most frequent colours, which is a third of the size."""
    picture = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
    tallest = 1100 if picture.width > 1000 else 1700
    picture = picture.crop((0, 0, picture.width, min(picture.height, tallest)))
    counted: Any = picture.getcolors(picture.width * picture.height)
    colours = [colour for _, colour in sorted(counted, reverse=True)[:COLOURS]]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in colours for value in colour])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
