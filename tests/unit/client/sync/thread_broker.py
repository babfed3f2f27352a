"""A broker and NameServer in threads, with one queue or more, for tests of blocking calls."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BrokerData, QueueData, TopicRouteData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.frame import Request
from penstock.wire.output import response

SEND = 310
BROKER = "broker-a"


class Sent(NamedTuple):
    """A send request that was received."""

    connection: int
    body: bytes
    message_id: str
    queue_id: int


class ThreadBroker:
    """Answers every request of a producer; each connection has a thread.

    `answer_send` may return another response code for a send, or None for no response. It may
    also wait.
    """

    def __init__(self, queues: int = 4) -> None:
        self.sent: list[Sent] = []
        self.answer_send: Callable[[Sent], int | None] = lambda sent: ResponseCode.SUCCESS
        self._queues = queues
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> "ThreadBroker":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for number in range(len(self._sockets)):
            self.cut(number)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def cut(self, connection: int) -> None:
        """Close a connection."""
        with contextlib.suppress(OSError):  # the client has closed it
            self._sockets[connection].shutdown(socket.SHUT_RDWR)

    def connections(self) -> set[int]:
        """The connections on which messages were sent."""
        return {sent.connection for sent in self.sent}

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(accepted)
            self._start(self._serve, len(self._sockets) - 1)

    def _serve(self, number: int) -> None:
        data, request = b"", Request()
        with self._sockets[number] as connection:
            while True:
                try:
                    piece = connection.recv(65536)
                except OSError:
                    return
                if not piece:
                    return
                data += piece
                request.bind(memoryview(bytearray(data)))
                at = 0
                while length := request.read(at, len(data)):
                    answer = self._answer(number, request)
                    if answer:
                        connection.sendall(answer)
                    at += length
                data = data[at:]

    def _answer(self, number: int, request: Request) -> bytes:
        code: int | None = ResponseCode.SUCCESS
        body, fields = b"", {}
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            body = fastjson.encode(self._route())
        elif request.code == SEND:
            ext = request.ext()
            properties = dict(pair.split("\x01") for pair in ext["i"].split("\x02") if pair)
            sent = Sent(number, request.body(), properties["UNIQ_KEY"], int(ext["e"]))
            with self._lock:
                self.sent.append(sent)
                fields = {"msgId": "0" * 32, "queueId": ext["e"], "queueOffset": "5"}
            opaque, encoding = request.opaque, request.encoding
            code = self.answer_send(sent)
            return b"" if code is None else response(code, opaque, encoding, ext=fields)
        return response(code, request.opaque, request.encoding, ext=fields, body=body)

    def _route(self) -> TopicRouteData:
        queues = QueueData(
            broker_name=BROKER, read_queue_nums=self._queues, write_queue_nums=self._queues, perm=6
        )
        broker = BrokerData(broker_name=BROKER, broker_addrs={0: self.address})
        return TopicRouteData(queue_datas=[queues], broker_datas=[broker])
