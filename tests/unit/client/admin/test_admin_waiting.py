"""Recall handles and delay levels, as brokers write them."""

import pytest

from penstock.broker.delay import recall_handle
from penstock.client.admin.admin_waiting import (
    RecallPlace,
    _waiting_levels,
    make_recall_handle,
    read_recall_handle,
)
from penstock.errors import InvalidParameter


def test_a_handle_is_that_of_the_broker() -> None:
    properties = {"TIMER_OUT_MS": "1795023243000", "UNIQ_KEY": "C0AB"}
    theirs = recall_handle.make_recall_handle("orders", "broker-a", properties).decode()
    assert make_recall_handle("orders", "broker-a", 1795023243000, "C0AB") == theirs
    assert read_recall_handle(theirs) == RecallPlace("orders", "broker-a", 1795023243001, "C0AB")
    assert read_recall_handle(theirs.rstrip("=")) == read_recall_handle(theirs)


@pytest.mark.parametrize("text", ["", "abc", "ä", "djEgdA==", "djIgYSBiIDEgYw=="])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="is not a recall handle"):
        read_recall_handle(text)


def test_levels_with_waiting_messages() -> None:
    table = {
        "scheduleMessageOffset_3": "17,20", "scheduleMessageOffset_4": "5,5",
        "scheduleMessageOffset_x": "1,2", "scheduleMessageOffset_5": "1", "other": "1,2",
    }  # fmt: skip
    assert _waiting_levels(table) == {3: (17, 20)}
