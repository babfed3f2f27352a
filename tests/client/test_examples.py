"""The examples run unchanged."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat import penstock

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Up]:
    with penstock.Up(tmp_path_factory.mktemp("examples")) as running:
        yield running


def run(code: list[str], up: penstock.Up) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *code],
        env={**os.environ, "NAMESRV_ADDR": up.address},
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_sends_and_consumes(up: penstock.Up) -> None:
    printed = run([str(EXAMPLES / "script.py")], up)
    assert {f"{name} hello, {name}" for name in ("Ada", "Grace", "Barbara")} <= set(
        printed.splitlines()
    )


def test_the_registration_example_reports_no_errors(up: penstock.Up) -> None:
    printed = run([str(EXAMPLES / "registration.py"), up.address], up)
    assert "0 of 1000" in printed
    assert "the throughput is" in printed


def test_the_fastapi_application(up: penstock.Up, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells its own authors which HTTP client to use
        from fastapi import testclient
    monkeypatch.setenv("NAMESRV_ADDR", up.address)
    monkeypatch.syspath_prepend(EXAMPLES)
    import fastapi_app

    with testclient.TestClient(fastapi_app.app) as client:
        answer = client.post("/users/42")
        assert answer.status_code == 200
        assert len(answer.json()["message"]) == 32
        deadline = time.monotonic() + PATIENCE_S
        while not client.get("/coupons/42").json():
            assert time.monotonic() < deadline


DJANGO = """
import json, os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "examples.django_app"
import django
django.setup()
from examples import django_app
from django.test import Client
pid = os.fork()  # a server's worker: the producer connects again
answer = Client().post("/users/42")
assert answer.status_code == 200, answer.content
assert len(json.loads(answer.content)["message"]) == 32
if pid:
    _, status = os.waitpid(pid, 0)
    assert status == 0
    django_app.producer.close()
    print("both sent")
else:
    sys.stdout.flush()
    os._exit(0)
"""


def test_the_django_application_sends_before_and_after_a_fork(up: penstock.Up) -> None:
    assert "both sent" in run(["-W", "default", "-c", DJANGO], up)


def test_the_notebook(up: penstock.Up, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"""
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read({str(EXAMPLES / "notebook.ipynb")!r}, as_version=4)
NotebookClient(notebook, timeout={PATIENCE_S}, kernel_name="python3").execute()
print([cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")])
"""
    assert "[\"'SEND_OK'\", '285', 'True']" in run(["-W", "default", "-c", code], up)
