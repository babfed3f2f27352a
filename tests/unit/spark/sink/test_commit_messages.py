"""Parcels of halves, and what notes about a batch come to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DecisionLost
from penstock.spark.sink.batch_status import (
    HERE,
    PART_BYTES_MAX,
    Body,
    Kind,
    Note,
    Part,
    bundles,
    decode_note,
    encode_note,
    fold,
)
from penstock.spark.sink.commit_messages import (
    ROWS_MAX,
    HalfOffsets,
    Parcel,
    Place,
    decode,
    digest,
    label,
)

offsets = st.integers(0, 2**62)
places = st.builds(Place, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
halves = st.lists(st.builds(HalfOffsets, offsets, offsets), min_size=1, max_size=5)
parcels = st.builds(
    Parcel, st.text(max_size=5), st.integers(0, 2**40), st.dictionaries(places, halves, max_size=3)
)


@given(parcels)
def test_a_parcel_comes_back_as_it_was(parcel: Parcel) -> None:
    data = parcel.encode()
    found = decode(data)
    assert found == parcel._replace(halves={p: sorted(h) for p, h in parcel.halves.items()})
    assert label(data).rows == parcel.rows == len(list(found.each()))
    assert label(data).expires_ms == parcel.expires_ms


@given(parcels, st.data())
def test_damaged_parcels_are_refused_or_read(parcel: Parcel, data: st.DataObject) -> None:
    whole = parcel.encode()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged))
        decode(bytes(damaged)[: data.draw(st.integers(0, len(whole)))])
    except DecisionLost:
        pass


def test_a_million_rows_are_a_few_megabytes() -> None:
    line = [HalfOffsets(7 * n, 1000 + 937 * n + n * n % 61) for n in range(ROWS_MAX)]
    data = Parcel("g", 0, {Place("broker-a", "127.0.0.1:10911", "orders"): line}).encode()
    assert len(data) * (1_000_000 / ROWS_MAX) < 4_000_000


def test_the_brokers_have_their_turn() -> None:
    a, b = Place("a", "", "t"), Place("b", "", "t")
    parcel = Parcel("g", 0, {a: [HalfOffsets(n, n) for n in range(3)], b: [HalfOffsets(9, 9)]})
    assert [place.broker for place, _ in parcel.each()] == ["a", "b", "a", "a"]


# --- notes


def _note(kind: Kind, *parcels: bytes, id: str = "", offset: int = 0) -> Note:
    return Note(
        kind, offset, Body("s", 1, "q", id, parts=[Part.of(HERE, parcels)]), b"".join(parcels)
    )


@given(parcels)
def test_a_note_comes_back_as_it_was(parcel: Parcel) -> None:
    note = _note(Kind.DECIDED, parcel.encode(), id="x")
    found = decode_note(Kind.DECIDED, 0, encode_note(note.body, note.inline))
    assert found == note
    assert found is not None
    assert list(found.body.parts[0].split(found.inline)) == [note.inline]
    assert list(found.body.parts[0].split(found.inline[:-1])) == [None]
    assert found.digests == {digest(note.inline)}


def test_what_is_no_note_is_left_alone() -> None:
    for data in (b"", b"{", b"[]", b'{"sink": 3, "batch": 1}\n', b"\xff\n"):
        assert decode_note(Kind.DONE, 0, data) is None


def test_the_first_decision_counts() -> None:
    first, second = (_note(Kind.DECIDED, b"1", id="a"), _note(Kind.DECIDED, b"2", id="b"))
    assert fold([]) == (False, None)
    assert fold([first, second]) == (False, first)
    assert fold([first, second, _note(Kind.DONE, id="b")]) == (True, None)
    assert fold([first, second, _note(Kind.DONE, id="a")]) == (True, first)
    assert fold([_note(Kind.DONE, id="a"), first]) == (True, first)


def test_an_abort_makes_later_decisions_void_and_no_earlier_one() -> None:
    decision, other = _note(Kind.DECIDED, b"1", b"2", id="a"), _note(Kind.DECIDED, b"3", id="b")
    abort = _note(Kind.ABORTED, b"2", b"9")
    assert fold([abort, decision]) == (False, None)
    assert fold([abort, decision, other]) == (False, other)
    assert fold([decision, abort]) == (False, decision)
    assert fold([decision, abort, _note(Kind.DONE, id="a")]) == (True, decision)


def test_bundles_fit_into_messages() -> None:
    given = [bytes(size) for size in (10, PART_BYTES_MAX, PART_BYTES_MAX + 5, 3, 4)]
    found = bundles(given)
    assert [data for bundle in found for data in bundle] == given
    assert [len(bundle) for bundle in found] == [1, 1, 1, 2]
    assert bundles([]) == []


def test_offsets_out_of_range_are_refused() -> None:
    data = Parcel("g", 0, {Place("b", "", "t"): [HalfOffsets(-1, 5)]}).encode()
    with pytest.raises(DecisionLost, match="out of range"):
        decode(data)
