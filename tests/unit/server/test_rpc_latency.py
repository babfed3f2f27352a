"""The time of requests: sends are counted by the request loop, others by code."""

from time import perf_counter_ns
from typing import Any, cast

from penstock.metrics import Registry
from penstock.server.pending_response import PendingResponse
from penstock.server.request_loop import RequestLoop
from penstock.server.rpc_latency import RpcLatency, add_rpc_metrics
from penstock.wire.codes import RequestCode, ResponseCode

MS = 1_000_000


def loop() -> RequestLoop:
    return RequestLoop(cast(Any, object()))


def counts(latency: RpcLatency, requests: RequestLoop) -> dict[tuple[str, str, str], list[int]]:
    return {
        (labels[1], labels[2], labels[3]): histogram.counts
        for labels, histogram in latency.histograms(requests)
    }


def pending(code: int, began_ns: int, *, suspended: bool = False) -> PendingResponse:
    made = PendingResponse(cast(Any, None), 1, 0, False, code, began_ns)
    made.suspended = suspended
    return made


def test_sends_are_counted_by_code_and_bucket() -> None:
    requests, latency = loop(), RpcLatency()
    requests.count_sends(1, 20, 3, 900_000)
    requests.count_sends(0, 1, 0, 3 * MS)
    requests.count_sends(0, 0, 1, 5000 * MS)
    found = counts(latency, requests)
    assert found["send_message", "success", "false"] == [1, *[0] * 9]
    assert found["send_message_v2", "success", "false"] == [20, 1, *[0] * 8]
    assert found["send_batch_message", "success", "false"] == [3, *[0] * 8, 1]
    sums = {labels[1]: one.total for labels, one in latency.histograms(requests)}
    assert sums["send_message_v2"] == 20 * 0.9 + 3


def test_other_requests_of_a_read_have_the_time_of_the_read() -> None:
    requests, latency = loop(), RpcLatency()
    key = RequestCode.PULL_MESSAGE << 16 | ResponseCode.PULL_NOT_FOUND
    latency.observe_read({key: 2}, 4 * MS)
    assert counts(latency, requests) == {
        ("pull_message", "pull_not_found", "false"): [0, 0, 2, *[0] * 7]
    }


def test_a_suspended_request_counts_from_its_read() -> None:
    requests, latency = loop(), RpcLatency()
    began = perf_counter_ns() - 500 * MS
    latency.observe(pending(RequestCode.PULL_MESSAGE, began, suspended=True), ResponseCode.SUCCESS)
    ((labels, histogram),) = latency.histograms(requests)
    assert labels[3] == "true"
    assert sum(histogram.counts[:6]) == 0
    assert histogram.total >= 500


def test_a_send_that_was_answered_later_is_in_the_same_histogram() -> None:
    requests, latency = loop(), RpcLatency()
    requests.count_sends(0, 1, 0, MS)
    latency.observe(pending(RequestCode.SEND_MESSAGE_V2, perf_counter_ns()), ResponseCode.SUCCESS)
    ((_, histogram),) = latency.histograms(requests)
    assert sum(histogram.counts) == 2


def test_a_late_flush_has_its_own_response_code() -> None:
    requests, latency = loop(), RpcLatency()
    latency.observe_late(RequestCode.SEND_MESSAGE_V2, ResponseCode.FLUSH_DISK_TIMEOUT, 6000 * MS, 4)
    assert counts(latency, requests) == {
        ("send_message_v2", "flush_disk_timeout", "false"): [*[0] * 9, 4]
    }


def test_an_unknown_response_code_is_a_number() -> None:
    requests, latency = loop(), RpcLatency()
    latency.observe_read({RequestCode.PULL_MESSAGE << 16 | 4711: 1}, MS)
    assert [labels[2] for labels, _ in latency.histograms(requests)] == ["4711"]


def test_a_server_without_a_store_has_no_appends() -> None:
    registry = Registry()
    add_rpc_metrics(registry, RpcLatency(), loop())
    assert [family.name for family in registry.families] == ["rocketmq_rpc_latency"]
