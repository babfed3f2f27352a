"""Two depths of one suite: a few rounds for CI, the full counts for a proof."""

import os

DEPTH = os.environ.get("PENSTOCK_DEPTH", "ci")


def rounds(*, ci: int, proof: int) -> int:
    """How often to do something at the depth of this run."""
    return proof if DEPTH == "proof" else ci
