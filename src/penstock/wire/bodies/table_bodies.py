"""Tables that are both files in `config/` and bodies between brokers.

Docstrings name the file and the request. Files are written by `fastjson.encode_pretty`, bodies of
GET_ALL_… by `fastjson.encode`.
"""

import struct
from typing import Final, Self

from msgspec import field

from penstock.errors import BodyError
from penstock.wire.bodies.client_bodies import (
    Body,
    DataVersion,
    Int,
    Long,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicQueueMappingDetail,
    TopicQueueMappingInfo,
)


class TopicConfigSerializeWrapper(Body):
    """topics.json; GET_ALL_TOPIC_CONFIG of 4.x."""

    topic_config_table: dict[str, TopicConfig] = {}
    data_version: DataVersion = DataVersion()


class TopicConfigAndMappingSerializeWrapper(TopicConfigSerializeWrapper):
    """GET_ALL_TOPIC_CONFIG of 5.x, and part of a registration."""

    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] = {}
    topic_queue_mapping_detail_map: dict[str, TopicQueueMappingDetail] = {}
    mapping_data_version: DataVersion = DataVersion()


class SubscriptionGroupWrapper(Body):
    """subscriptionGroup.json; GET_ALL_SUBSCRIPTIONGROUP_CONFIG.

    `forbidden_table` is group → topic → bits; bit 2 forbids reading.
    """

    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}
    forbidden_table: dict[str, dict[str, Int]] = {}
    data_version: DataVersion = DataVersion()


class ConsumerOffsetSerializeWrapper(Body):
    """consumerOffset.json; GET_ALL_CONSUMER_OFFSET: `topic@group` → queue → next offset."""

    offset_table: dict[str, dict[Int, Long]] = {}
    data_version: DataVersion = DataVersion()


class DelayOffsetSerializeWrapper(Body):
    """delayOffset.json; GET_ALL_DELAY_OFFSET: delay level → next offset in its queue."""

    offset_table: dict[Int, Long] = {}
    data_version: DataVersion = DataVersion()


class MessageRequestModeSerializeWrapper(Body):
    """messageRequestMode.json; GET_ALL_MESSAGE_REQUEST_MODE: topic → group → mode."""

    message_request_mode_map: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}


class OrderInfo(Body):
    """An ordered pop that is not acknowledged: a base offset and differences, times, counts."""

    pop_time: Long = 0
    invisible_time: Long | None = field(default=None, name="i")
    offset_list: list[Long] = field(default_factory=list, name="o")
    offset_next_visible_time: dict[Long, Long] | None = field(default=None, name="ot")
    offset_consumed_count: dict[Long, Int] | None = field(default=None, name="oc")
    last_consume_timestamp: Long = field(default=0, name="l")
    commit_offset_bit: Long = field(default=0, name="cm")
    attempt_id: str | None = field(default=None, name="a")


class ConsumerOrderInfoFile(Body):
    """consumerOrderInfo.json: `topic@group` → queue → pop in flight."""

    table: dict[str, dict[Int, OrderInfo]] = {}


class KVConfigSerializeWrapper(Body):
    """kvConfig.json of the NameServer: namespace → key → value."""

    config_table: dict[str, dict[str, str]] = {}


class Metric(Body):
    """A count and when it last changed."""

    count: Long = 0
    time_stamp: Long = 0


class TimerMetricsSerializeWrapper(Body):
    """timermetrics; GET_TIMER_METRICS: waiting messages by topic."""

    timing_count: dict[str, Metric] = {}
    data_version: DataVersion = DataVersion()


_CHECKPOINT: Final = struct.Struct(">7q")


class TimerCheckpoint(Body):
    """timercheck and GET_TIMER_CHECK_POINT: seven 8-byte integers, not JSON."""

    last_read_time_ms: Long = 0
    last_timer_log_flush_pos: Long = 0
    last_timer_queue_offset: Long = 0
    master_timer_queue_offset: Long = 0
    data_version: DataVersion = DataVersion()

    def pack(self) -> bytes:
        """The 56 bytes."""
        version = self.data_version
        return _CHECKPOINT.pack(
            self.last_read_time_ms,
            self.last_timer_log_flush_pos,
            self.last_timer_queue_offset,
            self.master_timer_queue_offset,
            version.state_version,
            version.timestamp,
            version.counter,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """From the first 56 bytes; a file is longer."""
        if len(data) < _CHECKPOINT.size:
            raise BodyError(f"timer checkpoint: {len(data)} bytes instead of {_CHECKPOINT.size}")
        read_ms, flushed, queue, master, state, timestamp, counter = _CHECKPOINT.unpack_from(data)
        return cls(
            last_read_time_ms=read_ms,
            last_timer_log_flush_pos=flushed,
            last_timer_queue_offset=queue,
            master_timer_queue_offset=master,
            data_version=DataVersion(counter=counter, state_version=state, timestamp=timestamp),
        )
