"""What recovery does with the files of a queue that is not in use yet. Everything may wait.

The queue's positions are not known then: `max_offset` is moved up to what is read.
"""

from collections.abc import Callable

from penstock.store.consumequeue.consumequeue import (
    ALLOCATE_BYTES,
    BLOCK_BYTES,
    FILLER_SIZE,
    ConsumeQueue,
    each_entry,
    unpack_entry,
)
from penstock.store.segment import is_number
from penstock.wire import layout

_CHUNK_ENTRIES = ALLOCATE_BYTES // layout.ENTRY_BYTES
_BLOCK_ENTRIES = BLOCK_BYTES // layout.ENTRY_BYTES


def find_below(queue: ConsumeQueue, physical_offset: int) -> int:
    """How many entries refer to records below a log offset.

    Valid entries grow with the log, so a binary search finds the last one; what follows it may be
    anything after a crash.
    """
    starts = [s for s in queue.file_starts if _is_below(queue, s, physical_offset)]
    if not starts:
        return queue.file_starts[0] if queue.file_starts else 0
    low = starts[len(starts) - 1] + 1
    high = starts[len(starts) - 1] + queue.file_entries
    step = 1
    while low + step < high:  # where there are many queues, most hold little
        if not _is_below(queue, low + step, physical_offset):
            high = low + step
            break
        low += step + 1
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if _is_below(queue, middle, physical_offset):
            low = middle + 1
        else:
            high = middle
    return low


def last_real(queue: ConsumeQueue, end: int) -> int:
    """The last queue offset before `end` that is not a filler for a lost message."""
    offset = end - 1
    while offset > queue.min_offset:
        entry = unpack_entry(queue.read(offset, 1) or b"")
        if entry is None or entry[1] != FILLER_SIZE or entry[2] == 0:
            break
        offset -= 1
    return offset


def count_below(queue: ConsumeQueue, physical_offset: int) -> int:
    """As `find_below`, but entry by entry, for queues with torn or damaged entries."""
    last, count = -1, _BLOCK_ENTRIES  # where there are many queues, most hold little
    end = queue.file_starts[0] if queue.file_starts else 0
    while end - end % queue.file_entries in queue.file_starts:
        queue.max_offset = max(queue.max_offset, end + count)
        data = queue.read(end, count) or b""
        count = _CHUNK_ENTRIES
        for offset, size, _ in each_entry(data):
            if size != FILLER_SIZE:
                if size <= 0 or not last < offset < physical_offset:
                    return end
                last = offset
            end += 1
        if len(data) < layout.ENTRY_BYTES:
            return end
    return end


def _is_below(queue: ConsumeQueue, offset: int, physical_offset: int) -> bool:
    queue.max_offset = max(queue.max_offset, offset + 1)
    entry = unpack_entry(queue.read(offset, 1) or b"")
    if entry is None or entry[1] <= 0:
        return False
    place = entry[2] if entry[1] == FILLER_SIZE else entry[0]
    return 0 <= place < physical_offset


def write_replayed(queue: ConsumeQueue) -> None:
    """Write the entries that recovery has in memory, where the file has other ones.

    Mostly it has the same: a process that dies leaves its entries in the page cache. Raises
    DiskFull.
    """
    data, queue.replayed = queue.replayed, None
    size = layout.ENTRY_BYTES
    offset = queue.max_offset - len(data or b"") // size
    first = queue.checked or not queue.file_starts or offset == queue.file_starts[0]
    while data:
        start = offset - offset % queue.file_entries
        piece = data[: (start + queue.file_entries - offset) * size]
        path, at = queue.path(start), (offset - start) * size
        if not queue.file_starts:
            queue.disk.make_directory(queue.folder, durable=False)
        fd = queue.disk.create(path, queue.file_entries * size)
        try:
            behind = at + len(piece)
            found = queue.disk.read_at(fd, len(piece) + -behind % BLOCK_BYTES, at)
            if found[: len(piece)] != piece:
                queue.disk.allocate(fd, at, len(piece), path)
                queue.disk.write(fd, memoryview(piece), at)
            queue.checked = (
                first
                and found.count(0, len(piece)) == len(found) - len(piece)
                and queue.disk.next_data(fd, behind + -behind % BLOCK_BYTES) < 0
            )
        finally:
            queue.disk.close_file(fd)
        queue.note_written(start)
        del data[: len(piece)]
        offset += len(piece) // size
    queue.checked = queue.checked and queue.file_starts[len(queue.file_starts) - 1] < offset


def has_data_from(queue: ConsumeQueue, offset: int) -> bool:
    """Whether anything was written at an entry's position or behind it."""
    last = queue.file_starts[len(queue.file_starts) - 1] if queue.file_starts else 0
    keep = offset - offset % queue.file_entries
    if last > keep:
        return True
    if keep not in queue.file_starts:
        return False
    fd = queue.disk.open_to_read(queue.path(keep))
    try:
        at, length = (offset - keep) * layout.ENTRY_BYTES, BLOCK_BYTES
        while at < queue.file_entries * layout.ENTRY_BYTES:
            at = queue.disk.next_data(fd, at)
            if at < 0:
                return False
            # At first up to the block's end: the next one is often not allocated.
            chunk = queue.disk.read_at(fd, length - at % length, at)
            length = ALLOCATE_BYTES
            if chunk != bytes(len(chunk)):
                return True
            at += len(chunk)
        return False
    finally:
        queue.disk.close_file(fd)


def first_written(queue: ConsumeQueue, offset: int) -> tuple[int, int, int] | None:
    """The first entry from `offset` on that is not zero, or None."""
    for start in queue.file_starts:
        if start + queue.file_entries <= offset:
            continue
        fd = queue.disk.open_to_read(queue.path(start))
        try:
            at = max(offset - start, 0) * layout.ENTRY_BYTES
            while (at := queue.disk.next_data(fd, at)) >= 0:
                at -= at % layout.ENTRY_BYTES
                chunk = queue.disk.read_at(fd, _CHUNK_ENTRIES * layout.ENTRY_BYTES, at)
                zeros = len(chunk) - len(chunk.lstrip(b"\0"))
                if zeros < len(chunk):
                    found = zeros - zeros % layout.ENTRY_BYTES
                    return unpack_entry(chunk[found:])
                if not chunk:
                    break
                at += len(chunk)
        finally:
            queue.disk.close_file(fd)
    return None


def end_of_used(queue: ConsumeQueue, is_used: Callable[[int, int], bool]) -> int:
    """Behind the last entry of the files that continues the queue and is a filler, or whose log
    offset and size are accepted by `is_used`."""
    known = end = queue.max_offset
    last = queue.entry(last_real(queue, known))
    begin = last[0] + last[1] if last is not None else 0
    while True:
        queue.max_offset = end + _CHUNK_ENTRIES
        data = queue.read(end, _CHUNK_ENTRIES) or b""
        queue.max_offset = known
        for offset, size, _ in each_entry(data):
            if size != FILLER_SIZE:
                if size <= 0 or offset < begin or not is_used(offset, size):
                    return end
                begin = offset + size
            end += 1
        if len(data) < layout.ENTRY_BYTES:
            return end


def has_fillers(queue: ConsumeQueue, end: int, place: int) -> bool:
    """Whether the files have fillers of this place from the queue's end to before `end`."""
    offset, known = queue.max_offset, queue.max_offset
    while offset < end:
        queue.max_offset = end
        data = queue.read(offset, min(end - offset, _CHUNK_ENTRIES)) or b""
        queue.max_offset = known
        found = [(size, tag) for _, size, tag in each_entry(data)]
        if not found or any(entry != (FILLER_SIZE, place) for entry in found):
            return False
        offset += len(found)
    return True


def other_file_size(queue: ConsumeQueue) -> int | None:
    """The size of the queue's files if it is not the configured one; for Apache stores."""
    size = queue.file_entries * layout.ENTRY_BYTES
    for name in queue.disk.names(queue.folder):
        length = queue.disk.size(queue.folder / name)
        if is_number(name) and (int(name) % size or length != size):
            return length
    return None


def close_gaps(queue: ConsumeQueue, physical_offset: int) -> None:
    """Delete files before or behind a gap, after a crash that undid changes of names.

    Entries below `physical_offset` are on the disk: if the file behind a gap begins with one, the
    files before the gap are left over from a deletion. Otherwise the file in the gap was not made
    durable in time, and what came later is replayed.
    """
    starts = queue.file_starts
    number = len(starts) - 1
    while number > 0:
        if starts[number] - starts[number - 1] != queue.file_entries:
            if _is_below(queue, starts[number], physical_offset):
                stale, queue.file_starts = starts[:number], starts[number:]
                number = 0
            else:
                stale, queue.file_starts = starts[number:], starts[:number]
            for start in stale:
                queue.disk.unlink(queue.path(start))
            queue.disk.sync_directory(queue.folder)
            starts = queue.file_starts
        number -= 1


def drop_files_of(queue: ConsumeQueue, end: int) -> None:
    """Delete files that refer to records below `end`: they belong to a deleted topic of this name.

    A file belongs to the deleted topic or to the new one; its first entry tells which.
    """
    old = []
    for start in queue.file_starts:
        queue.max_offset = max(queue.max_offset, start + queue.file_entries)
        first = queue.next_real(start, start + queue.file_entries)
        if first is not None and first[1][1] > 0 and first[1][0] < end:
            old.append(start)
    queue.max_offset = 0
    for start in old:
        queue.disk.unlink(queue.path(start))
        queue.file_starts.remove(start)
    if old:
        queue.disk.sync_directory(queue.folder)
