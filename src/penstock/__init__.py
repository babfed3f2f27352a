"""Penstock: a message broker in Python that speaks Apache RocketMQ's protocol and files."""

import os as _os

__version__ = "0.1.0"

if _os.environ.get("PENSTOCK_PURE") == "1":
    from penstock import purity as _purity

    _purity.install()


def compiled() -> bool:
    """Whether the per-message kernel runs as machine code (else: the same Python, slower)."""
    from penstock.wire import frame

    return not frame.__file__.endswith(".py")
