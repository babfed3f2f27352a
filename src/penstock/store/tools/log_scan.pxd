cimport cython
from penstock.wire cimport layout, octets
from penstock.wire.record cimport PropertyMarks, StoredRecord

cdef int _MORE
cdef int _AT_END
cdef int _AT_BLANK
cdef int _BAD
cdef int _TRANSACTION_MASK
cdef int _PREPARED
cdef int _ROLLBACK
cdef int _SPACE

cdef class LogWindow:
    cdef readonly object fetch
    cdef readonly unsigned char[::1] view
    cdef readonly long long start
    cdef readonly long long length
    cdef readonly long long left

    cpdef int load(self, long long offset, long long least) except -1

cdef class QueueComparison:
    cdef readonly bytes topic
    cdef readonly int queue_id
    cdef readonly object fetch
    cdef public bint any_tag
    cdef readonly long long records
    cdef readonly long long log_bytes
    cdef readonly long long matched
    cdef readonly list matches
    cdef readonly list misses
    cdef long long _match_from
    cdef long long _match_to
    cdef long long _miss_from
    cdef long long _miss_to
    cdef long long _miss_at
    cdef unsigned char[::1] _entries
    cdef long long _from
    cdef long long _to

    @cython.locals(offset="long long")
    cpdef int compare(self, StoredRecord stored) except -1
    @cython.locals(entries="unsigned char[::1]", at="long long")
    cdef bint _agrees(self, StoredRecord stored, long long offset) except -1
    cpdef int finish(self) except -1
    cdef int _close_match(self) except -1
    cdef int _close_miss(self) except -1
    cdef int _load(self, long long offset) except -1

cdef class LogScan:
    cdef readonly object make_queue
    cdef readonly StoredRecord stored
    cdef readonly long long offset
    cdef readonly long long needs
    cdef readonly long long blank
    cdef readonly long long records
    cdef readonly long long log_bytes
    cdef readonly long long queued
    cdef readonly long long keys
    cdef public long long keys_from
    cdef public long long keys_to
    cdef readonly long long last_offset
    cdef readonly long long first_ms
    cdef readonly long long last_ms
    cdef readonly long long backwards
    cdef readonly list queues
    cdef int[::1] _slots
    cdef unsigned int _mask

    @cython.locals(stored=StoredRecord, view="unsigned char[::1]", start="long long",
                   length="long long", at="long long", left="long long", size="long long",
                   magic=int, why=int, known=bint)
    cpdef int run(self, LogWindow window) except -1
    cdef int _take(self, StoredRecord stored) except -1
    @cython.locals(transaction=int, queue=QueueComparison)
    cdef int _compare(self, StoredRecord stored) except -1
    @cython.locals(slot="unsigned int", number=int, queue=QueueComparison)
    cdef QueueComparison _find(self, StoredRecord stored)
    cdef QueueComparison _add_queue(self, StoredRecord stored)
    @cython.locals(slot="unsigned int", queue=QueueComparison)
    cdef int _insert(self, int number) except -1

@cython.locals(marks=PropertyMarks, count=int, at="Py_ssize_t", end="Py_ssize_t",
               start="Py_ssize_t")
cpdef int count_keys(StoredRecord stored) except -1
