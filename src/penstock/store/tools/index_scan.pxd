cimport cython
from penstock.store.tools.log_scan cimport LogWindow
from penstock.wire cimport layout, octets
from penstock.wire.record cimport PropertyMarks, StoredRecord

cdef int _ENTRY_OK
cdef int _ENTRY_GARBLED
cdef int _ENTRY_CHAIN
cdef int _ENTRY_BEYOND
cdef int _ENTRY_NO_RECORD
cdef int _ENTRY_OTHER_KEY
cdef int _ENTRY_TIME
cdef int _SPACE
cdef long long _SECONDS_MAX

cdef class IndexScan:
    cdef readonly long long slots
    cdef readonly long long log_begin
    cdef readonly long long log_end
    cdef readonly long long begin_ms
    cdef public int number
    cdef readonly int problem
    cdef readonly long long alive
    cdef readonly long long deleted
    cdef readonly long long used
    cdef readonly StoredRecord stored
    cdef readonly int[::1] newest
    cdef readonly long long tags
    cdef long long _at
    cdef int _seed
    cdef unsigned char[::1] _separators

    @cython.locals(end="long long", number=int, problem=int)
    cpdef bint run(self, unsigned char[::1] entries, long long first, LogWindow window) except -1
    @cython.locals(count="long long", i="long long")
    cpdef long long differing_slot(self, unsigned char[::1] slots, long long first) except -2
    @cython.locals(key_hash=int, offset="long long", seconds=int, previous=int, slot="long long",
                   before=int)
    cdef int _check(self, unsigned char[::1] entries, long long at, int number,
                    LogWindow window) except -1
    @cython.locals(stored=StoredRecord, expected="long long")
    cdef int _check_record(self, int key_hash, long long offset, long long seconds,
                           LogWindow window) except -1
    @cython.locals(size="long long", stored=StoredRecord)
    cdef bint _read(self, long long offset, LogWindow window) except -1
    @cython.locals(marks=PropertyMarks, seed=int, found=int, at="Py_ssize_t", end="Py_ssize_t",
                   start="Py_ssize_t")
    cdef bint _has_key(self, StoredRecord stored, int wanted) except -1
    @cython.locals(marks=PropertyMarks)
    cdef bint _has_tag(self, StoredRecord stored, int wanted, int seed) except -1

cdef int _positive(int value) noexcept
