"""A healthy client as a separate process: sends one message after another until its standard input
ends, then prints the duration of each send in ms."""

import json
import select
import socket
import sys
import time

from penstock.wire.frame import Request
from penstock.wire.output import encode

PAUSE_SECONDS = 0.002


def send_frame(opaque: int, body: bytes = b"x" * 128) -> bytes:
    ext = {
        "a": "g", "b": "TopicT", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": f"UNIQ_KEY\x01{opaque:032X}\x02", "j": "0", "m": "false",
    }  # fmt: skip
    return encode(310, ext, body, opaque=opaque)


def read_frame(connection: socket.socket) -> Request:
    with connection.makefile("rb") as stream:
        size = stream.read(4)
        if len(size) < 4:
            raise ConnectionError("closed")
        data = size + stream.read(int.from_bytes(size, "big"))
    answer = Request()
    answer.bind(memoryview(bytearray(data)))
    assert answer.read(0, len(data)) == len(data)
    return answer


def main(port: int) -> None:
    taken = []
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        number = 0
        while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            began = time.perf_counter()
            connection.sendall(send_frame(number))
            answer = read_frame(connection)
            assert (answer.code, answer.opaque) == (0, number), answer.remark()
            taken.append((time.perf_counter() - began) * 1000)
            number += 1
            if number == 1:
                print("begun", flush=True)
    print(json.dumps(taken))


if __name__ == "__main__":
    main(int(sys.argv[1]))
