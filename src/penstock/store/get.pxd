cimport cython
from penstock.store.commitlog cimport CommitLog
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.segment cimport Segment
from penstock.wire cimport layout, octets
from penstock.wire.output cimport Output
from penstock.wire.record cimport StoredRecord

cdef int _FOUND
cdef int _NO_MATCHED_MESSAGE
cdef int _MESSAGE_WAS_REMOVING
cdef int _COLD
cdef int _RANGES_MAX
cdef long long _GAP_BYTES_MAX
cdef long long _SPAN_BYTES
cdef long long _SCAN_ENTRIES_MAX
cdef int _FILLER_SIZE
cdef int _RECORD

cdef class Reader:
    cdef readonly CommitLog log
    cdef readonly long long hot_bytes
    cdef readonly bint check
    cdef readonly long long next_offset
    cdef readonly long long min_offset
    cdef readonly long long max_offset
    cdef readonly int count
    cdef readonly long long total
    cdef readonly int ranges
    cdef long long[::1] _offsets
    cdef long long[::1] _lengths
    cdef long long[::1] _sizes
    cdef StoredRecord _stored
    cdef ConsumeQueue _queue
    cdef long long[::1] _tag_hashes
    cdef int _tag_hash_count
    cdef int _count_max
    cdef long long _bytes_max
    cdef bint _removed
    cdef unsigned char[::1] _span

    cpdef int set_tag_hashes(self, object codes) except -1
    @cython.locals(low="long long", high="long long", scan="long long")
    cpdef int find(self, ConsumeQueue queue, long long offset, int count_max, long long bytes_max,
                   long long confirm_offset, bint wait=*) except -1
    @cython.locals(begin="long long", last_end="long long", offset="long long", size=int)
    cdef void _scan(self, unsigned char[::1] entries, long long at, long long count)
    @cython.locals(i=int)
    cdef bint _matches_tag(self, long long code) noexcept
    @cython.locals(hot_from="long long", before="Py_ssize_t", i=int, offset="long long",
                   length="long long", segment=Segment, last=int, together=bint)
    cpdef bint copy_to(self, Output output, bint wait=*) except -1
    @cython.locals(begin="long long", last_end="long long", offset="long long", i=int)
    cdef int _last_of_span(self, int first, long long end) noexcept
    @cython.locals(begin="long long", length="long long", i=int)
    cdef bint _read_span(self, Segment segment, int first, int last, Output output,
                         bint wait) except -1
    @cython.locals(stored=StoredRecord, damaged=int, number=int, i=int, offset="long long",
                   end="long long", size="long long", cold=bint)
    cdef int _count_damaged(self, Output output, Py_ssize_t at, long long hot_from) except -1
