"""Three depths of one suite: quick for `make check`, a few rounds for CI, all for a proof."""

import os

DEPTH = os.environ.get("PENSTOCK_DEPTH", "ci")
CHECK_SHARE = 4
"""`make check` does this fraction of CI's rounds."""


def rounds(*, ci: int, proof: int) -> int:
    """How often to do something at the depth of this run."""
    if DEPTH == "check":
        return max(ci // CHECK_SHARE, 1)
    return proof if DEPTH == "proof" else ci
