cimport cython
from penstock.spark.arrow cimport byte_access
from penstock.wire cimport layout, octets

cdef int _ROWS
cdef int _WIDTH
cdef int _RECORD_BYTES_MAX
cdef int _STORE_AT
cdef int _BODY
cdef int _TOPIC
cdef int _UNIQUE
cdef int _TAGS
cdef int _PIECES_END
cdef int _SLACK
cdef int _RARE
cdef int _FRESH
cdef int _COUNT
cdef int _PIECES_FULL
cdef int _REACH
cdef int _COMPRESSED
cdef int _UNPLAIN
cdef int _TRANSACTION
cdef int _PREPARED
cdef int _ROLLBACK
cdef int _KNOWN
cdef int _NO
cdef int _YES
cdef int _ODD

@cython.final
cdef class Chunk:
    cdef const unsigned char[::1] source
    cdef readonly Py_ssize_t base
    cdef readonly int rows
    cdef readonly int pieces
    cdef readonly long long weight
    cdef readonly bint rare
    cdef readonly bint same_names
    cdef readonly bint same_topic
    cdef readonly bint full
    cdef int[::1] places
    cdef int[::1] spans
    cdef unsigned long long[::1] _notes
    cdef bint _body
    cdef bint _topic
    cdef bint _properties
    cdef long long _row_bytes
    cdef long long _rows_max
    cdef long long _weight_max
    cdef public long long offset
    cdef tuple _tags
    cdef bint _cut
    cdef object _topics
    cdef long long _first_ms
    cdef long long _until_ms
    cdef bint _check_crc
    cdef list _known
    cdef bytearray _verdicts
    cdef unsigned int _last

    cpdef int ask(self, object topics, tuple tags) except -1
    cpdef int ask_log(self, long long first_ms, long long until_ms, bint check_crc) except -1
    cdef int allow(self, long long rows, long long weight, long long row_bytes) except -1
    cpdef int bind(self, const unsigned char[::1] source) except -1
    cdef int clear(self) except -1
    @cython.locals(size=int, offset="long long")
    cdef Py_ssize_t walk_answer(self, Py_ssize_t at, Py_ssize_t end, long long until) except -1
    @cython.locals(size=int, verdict=int)
    cdef Py_ssize_t walk_log(self, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit,
                             long long log_offset) except -1
    cdef int _begin(self, Py_ssize_t at) except -1
    cdef bint _is_full(self, Py_ssize_t at) noexcept
    @cython.locals(left="Py_ssize_t", size=int, magic=int, sys_flag=int, row="Py_ssize_t",
                   place="Py_ssize_t", length=int, prefix=int)
    cdef int _place(self, Py_ssize_t at, Py_ssize_t end) noexcept
    @cython.locals(transaction=int, store_at="Py_ssize_t", stored_ms="long long")
    cdef bint _is_whole(self, Py_ssize_t at) noexcept
    @cython.locals(row="Py_ssize_t", body_at="Py_ssize_t", length=int, text_at="Py_ssize_t",
                   end="Py_ssize_t", crc=int)
    cdef bint _is_damaged(self, Py_ssize_t at) noexcept
    @cython.locals(row="Py_ssize_t", text_at="Py_ssize_t", length=int, count=int)
    cdef bint _take(self, Py_ssize_t at, int size) except -1
    @cython.locals(at="Py_ssize_t", length=int, tag=bytes)
    cdef bint _is_tagged(self, Py_ssize_t row) except -1
    @cython.locals(row="Py_ssize_t")
    cdef int _verdict(self) except -1
    cdef bint wants(self, Py_ssize_t topic_at, int length) except -1
    @cython.locals(place="unsigned int")
    cdef int verdict(self, Py_ssize_t at, int length) except -1
    @cython.locals(known=bytes)
    cdef bint _knows(self, unsigned int place, Py_ssize_t at, int length) except -1
    @cython.locals(topic=bytes, verdict=int)
    cdef int _judge(self, unsigned int place, Py_ssize_t at, int length) except -1
