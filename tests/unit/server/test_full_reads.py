"""Connections that always have more to read take turns."""

from collections.abc import Callable

from penstock.server.full_reads import SHORT_READ_BYTES, TURNS_MAX, FullReads

BUFFER_BYTES = 65_536


class Loop:
    """An event loop with connections that always fill their reads."""

    def __init__(self, connections: int) -> None:
        self.next_iteration: list[Callable[[], None]] = []
        self.full_reads = FullReads(
            memoryview(bytearray(BUFFER_BYTES)), lambda call: self.next_iteration.append(call)
        )
        self.connections = [Connection(self, number) for number in range(connections)]
        self.reads: list[tuple[int, int]] = []

    def iterate(self) -> list[tuple[int, int]]:
        """Run one iteration; returns the connections that read, and how many bytes."""
        calls, self.next_iteration = self.next_iteration, []
        for call in calls:
            call()
        self.reads = []
        for connection in self.connections:
            connection.read()
        return self.reads


class Connection:
    def __init__(self, loop: Loop, number: int) -> None:
        self.loop = loop
        self.number = number
        self.may_read = True

    def read(self) -> None:
        if self.may_read:
            self.loop.reads.append((self.number, len(self.loop.full_reads.view)))
            self.may_read = False
            self.loop.full_reads.wait(self)

    def end_yield(self) -> None:
        self.may_read = True


def test_one_connection_reads_in_every_iteration() -> None:
    loop = Loop(1)
    assert [loop.iterate() for _ in range(5)] == [[(0, BUFFER_BYTES)]] * 5


def test_a_loop_iteration_has_few_full_reads_however_many_connections_there_are() -> None:
    loop = Loop(10)
    first = [size for _, size in loop.iterate()]
    assert first == [BUFFER_BYTES] * TURNS_MAX + [SHORT_READ_BYTES] * (10 - TURNS_MAX)
    rounds = [loop.iterate() for _ in range(50)]
    assert {len(reads) for reads in rounds} == {TURNS_MAX}
    assert {size for reads in rounds for _, size in reads} == {BUFFER_BYTES}
    turns = [number for reads in rounds for number, _ in reads]
    assert {turns.count(number) for number in range(10)} == {5 * TURNS_MAX}, "the turns are equal"


def test_other_connections_read_a_little_in_an_iteration_that_had_its_full_reads() -> None:
    loop = Loop(3)
    loop.iterate()
    loop.iterate()
    assert len(loop.full_reads.view) == SHORT_READ_BYTES
    loop.connections = []
    loop.iterate()
    assert len(loop.full_reads.view) == BUFFER_BYTES
