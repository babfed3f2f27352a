"""A page of the console in the browser."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Dialog, Locator, Page

UNKNOWN = "\N{EN DASH}"
"""How an unknown value is shown."""


class ConsolePage:
    """Opens addresses and reads tables."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def open(self, path: str) -> ConsolePage:
        """Go to a page and wait until it is shown, or until there is a login."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("main[data-page], .login form")
        return self

    def go(self, path: str) -> ConsolePage:
        """Wait until the address is this one and the page is shown."""
        self.page.wait_for_url(self.url + path)
        self.page.wait_for_selector("main[data-page]")
        return self

    def log_in(self, name: str, password: str) -> None:
        """Fill in the form of the login and send it."""
        self.find("input[name=name]").fill(name)
        self.find("input[name=password]").fill(password)
        self.button("Log in").click()

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def button(self, name: str, inside: str = "body") -> Locator:
        return self.page.locator(inside).get_by_role("button", name=name, exact=True)

    def rows(self, selector: str = "main") -> dict[str, list[str]]:
        """The rows of a table: key → texts of the cells."""
        self.page.wait_for_selector(f"{selector} tbody tr")
        return dict(
            self.page.locator(f"{selector} tbody tr").evaluate_all(
                "rows => rows.map(row => [row.dataset.key,"
                " [...row.cells].map(cell => cell.innerText.trim())])"
            )
        )

    def stat(self, name: str) -> str:
        """The value of a figure."""
        return self.page.locator(f'.stat[data-stat="{name}"] .value').inner_text()

    def expect(self, text: str, inside: str = "main") -> Locator:
        """Wait until a text is visible."""
        found = self.page.locator(inside).get_by_text(text, exact=False).first
        found.wait_for()
        return found

    def call(self, method: str, path: str, body: Any = None) -> int:
        """The status of a request that the page sends itself, with its cookie and token."""
        return int(
            self.page.evaluate(
                "async ([method, path, body]) => {"
                " const session = await (await fetch('/api/session')).json();"
                " const headers = {'x-penstock-csrf': session.csrf || '',"
                " 'content-type': 'application/json'};"
                " const answer = await fetch('/api' + path, {method, headers,"
                " body: method === 'GET' ? undefined : JSON.stringify(body || {})});"
                " return answer.status; }",
                [method, path, body],
            )
        )

    def accept_dialogs(self) -> None:
        def accept(dialog: Dialog) -> None:
            dialog.accept()

        self.page.on("dialog", accept)
