"""Hypothesis strategies that the tests of replication share."""

from hypothesis import strategies as st

from penstock.replication.epochs import Epoch, EpochHistory

I32_MAX = 2**31 - 1
I64_MAX = 2**63 - 1
OFFSETS = st.integers(0, I64_MAX)
EPOCHS = st.builds(Epoch, st.integers(0, I32_MAX), OFFSETS)


@st.composite
def histories(draw: st.DrawFn, count_max: int = 8) -> EpochHistory:
    numbers = sorted(draw(st.sets(st.integers(0, I32_MAX), max_size=count_max)))
    count = len(numbers)
    begins = sorted(draw(st.lists(OFFSETS, min_size=count, max_size=count)))
    return EpochHistory(map(Epoch, numbers, begins))
