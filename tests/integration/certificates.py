"""Certificates for tests, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def make_pair(folder: Path, name: str, *, password: str = "") -> Pair:
    """A self-signed certificate for `name` and 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", str(pair.key), "-out", str(pair.certificate),
    ]  # fmt: skip
    command += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(command, check=True, capture_output=True)
    return pair
