"""The index side of a verification: entries, chains, slots and header of each file."""

from collections.abc import Iterator
from pathlib import Path

from penstock.store.index import index_file_bytes
from penstock.store.tools.file_pieces import read_piece
from penstock.store.tools.index_scan import (
    ENTRY_BEYOND,
    ENTRY_CHAIN,
    ENTRY_GARBLED,
    ENTRY_NO_RECORD,
    ENTRY_OTHER_KEY,
    ENTRY_TIME,
    IndexScan,
)
from penstock.store.tools.inspection import IndexHead
from penstock.store.tools.problem import DAMAGE, NOTE, Problem, merge_neighbours
from penstock.store.tools.verification_state import VerificationState
from penstock.wire import layout, octets

PIECE_ENTRIES = 50_000
_KINDS = {
    ENTRY_GARBLED: ("garbled", "has impossible values"),
    ENTRY_CHAIN: ("chain", "does not link to the entry before it in its slot: older keys are lost"),
    ENTRY_BEYOND: ("beyond", "points behind the log's end"),
    ENTRY_NO_RECORD: ("no-record", "points at no record"),
    ENTRY_OTHER_KEY: ("other-key", "points at a record that has no such key"),
    ENTRY_TIME: ("time", "gives another time than its record: queries by time miss it"),
}


def check_index(verification: VerificationState) -> Iterator[Problem]:
    """All index files, oldest first."""
    files = verification.files
    paths = [path for path, _ in verification.index]
    verification.totals.index_files = len(paths)
    if paths and not files.sizes.index_slots:
        yield Problem(
            NOTE,
            "index.sizes",
            "index",
            0,
            "the number of slots is unknown, so the index is not checked: give --index-slots and "
            "--index-entries",
        )
        return
    alive = 0
    for place, (path, head) in enumerate(verification.index):
        check = _FileCheck(verification, path, last=place == len(paths) - 1)
        yield from check.run(head)
        alive += check.alive
    missing = verification.scan.keys - alive
    if paths and missing and not files.crashed:
        text = (
            "keys of records are not in the index: queries do not find them"
            if missing > 0
            else "more entries than keys: some keys were added twice"
        )
        yield Problem(NOTE, "index.keys", "index", 0, text, abs(missing))


class _FileCheck:
    """One index file; recovery rebuilds slots and header of a crashed store's last one."""

    def __init__(self, verification: VerificationState, path: Path, *, last: bool) -> None:
        self.verification = verification
        self.files = verification.files
        self.path = path
        self.name = str(path.relative_to(self.files.root))
        self.rebuilt = last and self.files.crashed
        self.entries_at = index_file_bytes(self.files.sizes.index_slots, 0)
        self.alive = 0
        self.broken_chain = False

    def run(self, head: IndexHead | None) -> Iterator[Problem]:
        length = self.path.stat().st_size
        expected = self.files.index_bytes()
        if length != expected or head is None:
            text = f"has {length} bytes instead of {expected}: a broker ignores it"
            yield Problem(DAMAGE, "index.length", self.name, 0, text)
            return
        if not 1 <= head.next_number <= self.files.sizes.index_entries:
            text = f"the header counts {head.next_number - 1} entries, which is impossible"
            at = layout.INDEX_NEXT_NUMBER_AT
            yield Problem(self._severity(), "index.header", self.name, at, text)
            return
        scan = IndexScan(
            self.files.sizes.index_slots,
            log_begin=self.files.log_begin,
            log_end=self.verification.totals.log_end,
            begin_ms=head.begin_ms,
        )
        yield from merge_neighbours(self._entries(scan, head))
        self.alive = scan.alive - scan.tags
        self.verification.totals.index_entries += head.next_number - 1
        if not self.broken_chain and not (self.rebuilt and self.files.live):
            yield from self._slots(scan)
            if scan.used != head.slots_used:
                text = f"the header counts {head.slots_used} slots in use, there are {scan.used}"
                at = layout.INDEX_SLOTS_USED_AT
                yield Problem(self._severity(), "index.header", self.name, at, text)

    def _entries(self, scan: IndexScan, head: IndexHead) -> Iterator[tuple[int, Problem]]:
        window = self.files.window()
        first = 1
        while first < head.next_number:
            self.verification.tell("index", first, head.next_number)
            count = min(PIECE_ENTRIES, head.next_number - first)
            data = read_piece(
                self.path,
                self.entries_at + first * layout.INDEX_ENTRY_BYTES,
                count * layout.INDEX_ENTRY_BYTES,
            )
            view = memoryview(data)
            while not scan.run(view, first, window):
                at = (scan.number - 1 - first) * layout.INDEX_ENTRY_BYTES
                physical = octets.get_i64(data, at + layout.INDEX_OFFSET_AT)
                yield scan.number, self._entry(scan, physical)
            first += count
        self.verification.tell("index", head.next_number, head.next_number)

    def _entry(self, scan: IndexScan, physical: int) -> Problem:
        number = scan.number - 1
        kind, text = _KINDS[scan.problem]
        self.broken_chain |= scan.problem in (ENTRY_GARBLED, ENTRY_CHAIN)
        rebuilt_by_recovery = self.verification.rebuilt_by_recovery(physical)
        severity = NOTE if rebuilt_by_recovery else DAMAGE
        return Problem(
            severity,
            f"index.{kind}",
            self.name,
            self.entries_at + number * layout.INDEX_ENTRY_BYTES,
            f"entry {number} {text} (log offset {physical})"
            + ("; recovery rebuilds it" if rebuilt_by_recovery else ""),
        )

    def _slots(self, scan: IndexScan) -> Iterator[Problem]:
        """Each slot must name the newest of its entries."""
        piece = 1_000_000
        for first in range(0, self.files.sizes.index_slots, piece):
            count = min(piece, self.files.sizes.index_slots - first)
            data = read_piece(
                self.path, index_file_bytes(first, 0), count * layout.INDEX_SLOT_BYTES
            )
            slot = scan.differing_slot(memoryview(data), first)
            if slot >= 0:
                at = (slot - first) * layout.INDEX_SLOT_BYTES
                yield Problem(
                    self._severity(),
                    "index.slot",
                    self.name,
                    index_file_bytes(slot, 0),
                    f"slot {slot} names entry {octets.get_i32(data, at)}, its "
                    f"newest is {scan.newest[slot]}: queries miss keys",
                )

    def _severity(self) -> str:
        return NOTE if self.rebuilt else DAMAGE
