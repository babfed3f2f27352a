"""Requests as the handlers see them."""

from penstock.rpc.command import Command
from penstock.wire.codes import CUT_CODES, RequestCode
from penstock.wire.frame import BINARY, JSON


def test_pop_codes_truncated_by_binary_headers_are_restored() -> None:
    for code in RequestCode:
        sent = code & 0xFFFF  # what Java writes into 16 bits
        assert Command(sent, encoding=BINARY).code == code
    assert Command(3442, encoding=JSON).code == 3442
    assert not set(CUT_CODES) & set(RequestCode), "no other request has such a code"
