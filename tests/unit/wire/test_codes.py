"""Numbers and names of the protocol, and the rules for names."""

import pytest

from penstock.wire import codes
from penstock.wire.codes import LanguageCode, RequestCode, ResponseCode


def test_codes_equal_those_of_the_reference() -> None:
    for code, name in (
        (310, "SEND_MESSAGE_V2"),
        (34, "HEART_BEAT"),
        (105, "GET_ROUTEINFO_BY_TOPIC"),
        (1005, "CONTROLLER_GET_METADATA_INFO"),
        (3010, "AUTH_LIST_ACL"),
        (200050, "POP_MESSAGE"),
    ):
        assert RequestCode(code).name == name
    assert ResponseCode(21) is ResponseCode.PULL_OFFSET_MOVED
    assert ResponseCode(1500) is ResponseCode.GO_AWAY
    assert LanguageCode(13) is LanguageCode.NODE_JS


def test_no_two_names_share_a_number() -> None:
    for kind in (RequestCode, ResponseCode, LanguageCode):
        assert len(kind.__members__) == len(list(kind))


def test_unknown_codes_have_a_name() -> None:
    assert codes.request_name(34) == "HEART_BEAT"
    assert codes.request_name(12345) == "UNKNOWN(12345)"
    assert codes.request_name(-1) == "UNKNOWN(-1)"
    assert codes.response_name(0) == "SUCCESS"
    assert codes.response_name(-1000) == "RPC_UNKNOWN"
    assert codes.response_name(9999) == "UNKNOWN(9999)"
    assert codes.language_name(9) == "GO"
    assert codes.language_name(99) == "OTHER"


def test_sys_flag_parts_do_not_overlap() -> None:
    parts = (
        codes.SYS_COMPRESSED,
        codes.SYS_MULTI_TAGS,
        codes.SYS_TRANSACTION_MASK,
        codes.SYS_BORN_HOST_V6,
        codes.SYS_STORE_HOST_V6,
        codes.SYS_NEED_UNWRAP,
        codes.SYS_INNER_BATCH,
        codes.SYS_COMPRESSION_MASK,
    )
    assert sum(parts) == 0x7FF


def test_reserved_properties_are_distinct() -> None:
    names = [value for name, value in vars(codes).items() if name.startswith("PROPERTY_")]
    assert len(names) == len(set(names))
    assert "KEYS" in codes.RESERVED_PROPERTIES
    assert "__SHARDINGKEY" not in codes.RESERVED_PROPERTIES


@pytest.mark.parametrize("name", ["T", "%RETRY%g", "a-b_c|d", "x" * 127, "%RETRY%" + "x" * 248])
def test_valid_topic_names_are_accepted(name: str) -> None:
    assert codes.topic_fault(name) is None


@pytest.mark.parametrize("name", ["", "  ", "a b", "a.b", "é", "x" * 128, "%DLQ%" + "x" * 251])
def test_invalid_topic_names_are_refused_with_a_reason(name: str) -> None:
    assert codes.topic_fault(name)


def test_group_names_have_a_shorter_limit_than_topic_names() -> None:
    assert codes.group_fault("g" * 120) is None
    fault = codes.group_fault("g" * 121)
    assert fault is not None
    assert "121" in fault
    assert "120" in fault


def test_system_topics_and_groups_are_recognised() -> None:
    assert codes.is_system_topic("TBW102")
    assert codes.is_system_topic("rmq_sys_REVIVE_LOG_c")
    assert not codes.is_system_topic("%RETRY%g")
    assert codes.is_system_group("TOOLS_CONSUMER")
    assert codes.is_system_group("CID_RMQ_SYS_x")
    assert not codes.is_system_group("g")
