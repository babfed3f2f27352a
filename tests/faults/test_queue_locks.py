"""Queue locks of orderly consumers survive kill -9 of the broker right after the response."""

import json
import socket
from pathlib import Path

import pytest

from penstock.wire.codes import RequestCode
from penstock.wire.output import encode
from tests.compat import penstock
from tests.depth import rounds
from tests.faults.healthy_client import read_frame, send_frame

QUEUES = 4


def connect(up: penstock.Up) -> socket.socket:
    host, _, port = up.broker_address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(connection: socket.socket, code: int, client_id: str, queue_ids: list[int]) -> set[int]:
    """Lock or unlock queues; returns the queues that the client owns."""
    queues = [{"topic": "TopicT", "brokerName": "broker-a", "queueId": n} for n in queue_ids]
    body = json.dumps({"consumerGroup": "g", "clientId": client_id, "mqSet": queues}).encode()
    connection.sendall(encode(code, {}, body, opaque=1))
    answer = read_frame(connection)
    assert answer.code == 0, answer.remark()
    owned = json.loads(bytes(answer.body()) or b"{}").get("lockOKMQSet", [])
    return {queue["queueId"] for queue in owned}


@pytest.mark.slow
def test_an_owner_keeps_its_queues_when_the_broker_is_killed(tmp_path: Path) -> None:
    owners: dict[int, str] = {}
    with penstock.Up(tmp_path) as up:
        with connect(up) as connection:
            connection.sendall(send_frame(1))
            assert read_frame(connection).code == 0
        for number in range(rounds(ci=4, proof=40)):
            queue_id, mine, other = number % QUEUES, f"c{number}", f"other{number}"
            with connect(up) as connection:
                if queue_id in owners:
                    ask(connection, RequestCode.UNLOCK_BATCH_MQ, owners.pop(queue_id), [queue_id])
                assert ask(connection, RequestCode.LOCK_BATCH_MQ, mine, [queue_id]) == {queue_id}
                up.kill()
            owners[queue_id] = mine
            up.start()
            with connect(up) as connection:
                locked = ask(connection, RequestCode.LOCK_BATCH_MQ, other, [*owners])
                assert not locked, "another client got a queue that has an owner"
                for owned, owner in owners.items():
                    assert ask(connection, RequestCode.LOCK_BATCH_MQ, owner, [owned]) == {owned}
