"""Failed messages are sent back to a broker."""

import pytest

from penstock.client.consumer.dispatch.send_back import SendBack, sent_topic
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import NoRoute, PeerUnreachable, PenstockError
from penstock.wire.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZSTD, RequestCode
from penstock.wire.message import decode_properties
from tests.unit.client.consumer.consumer_kit import record
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakeSession, run


def back(*, retry_topic: bool = True) -> tuple[FakeCluster, SendBack]:
    cluster = FakeCluster()
    cluster.add_topic("Orders", {"broker-a": 4})
    if retry_topic:
        cluster.add_topic("%RETRY%g", {"broker-a": 1, "broker-b": 1})
    return cluster, SendBack(FakeSession(cluster).real, GROUP, retries_max=16)


def a_message(**fields: object) -> ReceivedMessage:
    return decode_records(record(5, **fields), "broker-a")[0]  # type: ignore[arg-type]


def test_message_is_sent_back_to_its_broker() -> None:
    async def body() -> None:
        cluster, send_back = back()
        message = a_message(properties={"UNIQ_KEY": "ID5"})
        await send_back(message, 4)
        assert cluster.log == [
            (
                "broker-a",
                RequestCode.CONSUMER_SEND_MSG_BACK,
                {
                    "offset": "1005",
                    "group": "g",
                    "delayLevel": "4",
                    "originMsgId": "ID5",
                    "originTopic": "Orders",
                    "unitMode": "false",
                    "maxReconsumeTimes": "16",
                    "bname": "broker-a",
                },
            )
        ]

    run(body())


def test_copy_is_sent_if_the_broker_refuses_the_message() -> None:
    async def body() -> None:
        cluster, send_back = back()
        cluster.refuse[RequestCode.CONSUMER_SEND_MSG_BACK] = 1
        message = a_message(
            topic="%RETRY%g", reconsume_times=2, flag=9, body=b"squeezed",
            sys_flag=SYS_COMPRESSED | SYS_COMPRESSION_ZSTD | 0x08,
            properties={
                "UNIQ_KEY": "ID5", "RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": "FIRST",
                "TAGS": "a", "TRAN_MSG": "true", "TIMER_DELIVER_MS": "17", "DELAY": "3",
            },
        )  # fmt: skip
        assert sent_topic(message) == "Orders"
        await send_back(message)
        broker, code, fields = cluster.log[-1]
        assert (broker, code) == ("broker-a", RequestCode.SEND_MESSAGE_V2)
        assert cluster.bodies[-1] == b"squeezed"
        assert fields["f"] == str(SYS_COMPRESSED | SYS_COMPRESSION_ZSTD)
        assert decode_properties(fields.pop("i").encode()) == {
            "UNIQ_KEY": "ID5", "RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": "FIRST", "TAGS": "a",
            "DELAY": "5",
        }  # fmt: skip
        assert {name: fields[name] for name in "abehjlmn"} == {
            "a": "CLIENT_INNER_PRODUCER", "b": "%RETRY%g", "e": "0", "h": "9", "j": "3", "l": "16",
            "m": "false", "n": "broker-a",
        }  # fmt: skip

    run(body())


def test_copy_goes_to_another_broker_if_the_first_is_down() -> None:
    async def body() -> None:
        cluster, send_back = back()
        cluster.down = {"broker-a"}
        await send_back(a_message())
        assert [(broker, code) for broker, code, _ in cluster.log] == [
            ("broker-b", RequestCode.SEND_MESSAGE_V2)
        ]
        cluster.down = {"broker-a", "broker-b"}
        with pytest.raises(PeerUnreachable, match="broker-b"):
            await send_back(a_message())

    run(body())


def test_copy_fails_without_a_retry_topic() -> None:
    async def body() -> None:
        cluster, send_back = back(retry_topic=False)
        cluster.refuse[RequestCode.CONSUMER_SEND_MSG_BACK] = 1
        with pytest.raises(NoRoute):
            await send_back(a_message())
        assert issubclass(NoRoute, PenstockError)

    run(body())
