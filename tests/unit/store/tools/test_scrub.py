"""Scrubbing: every record of the log is checked, at a limited rate, also while a broker writes."""

import logging
from pathlib import Path

import pytest

from penstock.cli import store_command
from penstock.cli.main import main
from penstock.store.store import MessageStore
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import DAMAGE, Problem
from penstock.store.tools.scrub import MEGABYTE, PIECE_BYTES, BackgroundScrub, Scrub
from tests.unit.store.conftest import NOW_MS, StoreFixture, WatchedDisk, flush, put, record
from tests.unit.store.tools.inspect_kit import (
    CONFIG,
    COUNT,
    START_MS,
    fill,
    flip_log,
    make_store,
    write_at,
)

SECOND_MS = 1000
HOUR_MS = 3_600_000


def problems(scrub: Scrub) -> list[Problem]:
    return [found for found in scrub.run() if found is not None]


def test_a_good_log_is_checked_completely(tmp_path: Path) -> None:
    make_store(tmp_path)
    scrub = Scrub(StoreFiles(tmp_path))
    assert problems(scrub) == []
    assert (scrub.totals.records, scrub.totals.damage) == (COUNT, 0)


def test_damaged_records_are_found_and_the_rest_is_checked(tmp_path: Path) -> None:
    placed = make_store(tmp_path)
    for number in (10, 200):
        flip_log(tmp_path, placed[number][0] + 90)
    scrub = Scrub(StoreFiles(tmp_path))
    found = problems(scrub)
    assert [problem.kind for problem in found] == ["log.crc", "log.crc"]
    assert "queue offset 3" in found[0].text
    assert (scrub.totals.records, scrub.totals.damage) == (COUNT - 2, 2)


def test_a_log_is_read_in_small_parts(tmp_path: Path) -> None:
    make_store(tmp_path)
    files = StoreFiles(tmp_path)
    parts = list(Scrub(files).run())
    assert len(parts) >= len(files.log) > 1
    assert files.chunk_bytes == PIECE_BYTES


def test_an_open_store_is_checked_up_to_the_given_offset(stores: StoreFixture) -> None:
    store = stores.open()
    offsets = put(store, *[record(b"%d" % n) for n in range(20)])
    scrub = Scrub(StoreFiles(stores.root), confirm_offset=offsets[12])
    assert problems(scrub) == []
    assert scrub.totals.records == 12


def test_a_segment_that_retention_deletes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    make_store(tmp_path)
    files = StoreFiles(tmp_path)
    scrub = Scrub(files)
    files.log[1].path.unlink()
    assert [p for p in problems(scrub) if p.severity == DAMAGE] == []
    assert 0 < scrub.totals.records < COUNT


class Scrubbed:
    """An open store that is scrubbed at 1 MB/s."""

    def __init__(self, stores: StoreFixture, **changes: int) -> None:
        self.now_ms = NOW_MS
        self.store = stores.open(**{"scrub_mb_per_s": 1, **changes})

    def tick(self, ms: int = SECOND_MS) -> BackgroundScrub:
        self.now_ms += ms
        self.store.tick(self.now_ms)
        return self.store.scrub


def test_a_broker_scrubs_its_log_and_reports_damage_once(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    scrubbed = Scrubbed(stores, scrub_hours=1)
    offsets = put(scrubbed.store, *[record(b"%d" % n * 20) for n in range(50)])
    flush(scrubbed.store)
    path = stores.root / "commitlog" / f"{0:020d}"
    at = offsets[7] + 95
    write_at(path, at, bytes([path.read_bytes()[at] ^ 1]))
    with caplog.at_level(logging.INFO):
        scrub = scrubbed.tick()
        assert (scrub.records, scrub.passes, len(scrub.damaged)) == (49, 1, 1)
        assert f"{path} @{offsets[7]}: the body does not match its CRC" in caplog.text
        assert "it was a message of topic t, queue 0, queue offset 7" in caplog.text
        caplog.clear()
        scrubbed.tick()
        assert scrub.passes == 1, "the next pass begins after scrub_hours"
        scrubbed.tick(HOUR_MS)
        assert (scrub.records, scrub.passes, len(scrub.damaged)) == (98, 2, 1)
    assert "found damage" not in caplog.text
    assert "scrubbed" in caplog.text


def test_the_rate_limits_what_is_read_per_second(stores: StoreFixture) -> None:
    scrubbed = Scrubbed(stores, segment_bytes=8 * MEGABYTE, scrub_mb_per_s=1)
    put(scrubbed.store, *[record(b"x" * 10_000) for _ in range(300)])
    flush(scrubbed.store)
    seen = [scrubbed.tick().records for _ in range(5)]
    assert seen[-1] == 300
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert all(step <= (MEGABYTE + PIECE_BYTES) // 10_000 for step in steps)
    assert scrubbed.store.scrub.passes == 1


def test_a_store_does_not_scrub_unless_it_is_told_to(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk)
    put(store, record())
    flush(store)
    store.tick(NOW_MS + HOUR_MS)
    assert (store.scrub.records, store.scrub.passes) == (0, 0)


def test_what_is_not_flushed_is_not_scrubbed(stores: StoreFixture) -> None:
    scrubbed = Scrubbed(stores)
    put(scrubbed.store, record())
    scrub = scrubbed.tick()
    assert (scrub.records, len(scrub.damaged)) == (0, 0)


class Command:
    """`penstock store scrub`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, root: Path, *options: str) -> tuple[int, str]:
        """The exit code and the output."""
        code = main(["store", "scrub", str(root), *options])
        return code, self._capsys.readouterr().out


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_the_command_tells_good_from_damaged_stores(tmp_path: Path, command: Command) -> None:
    placed = make_store(tmp_path)
    code, text = command.run(tmp_path)
    assert (code, "good: no damage" in text, f"{COUNT} records" in text) == (0, True, True)
    flip_log(tmp_path, placed[30][0] + 90)
    code, text = command.run(tmp_path)
    assert (code, "the body does not match its CRC" in text) == (2, True)
    code, text = command.run(tmp_path, "--json", "--limit", "0")
    assert (code, '"good":false' in text, '"unprinted":1' in text) == (2, True, True)


def test_the_command_keeps_to_its_rate(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path)
    size = Scrub(StoreFiles(tmp_path))
    list(size.run())
    slept: list[float] = []
    monkeypatch.setattr(store_command.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(store_command.time, "sleep", slept.append)
    command.run(tmp_path, "--rate", "0.01")
    assert sum(slept) == pytest.approx(size.checked_bytes / 10_000)


def test_the_command_scrubs_the_store_of_a_running_broker(tmp_path: Path, command: Command) -> None:
    store = MessageStore(tmp_path, CONFIG, disk=WatchedDisk(), now_ms=START_MS)
    fill(store)
    flush(store)
    store.tick(START_MS + 60_000)
    code, text = command.run(tmp_path)
    assert (code, f"{COUNT} records" in text) == (0, True)
    store.close()
