"""The rate of a counter."""

from penstock.replication.byte_rate import ByteRate


def test_the_rate_is_that_of_the_last_period() -> None:
    rate = ByteRate(10_000)
    rate.sample(500, 10_999)
    assert rate.per_second == 0
    rate.sample(3_000, 11_500)
    assert rate.per_second == 2_000
    rate.sample(9_000, 12_000)
    assert rate.per_second == 2_000
    rate.sample(3_000, 12_500)
    assert rate.per_second == 0
