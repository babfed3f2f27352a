cimport cython
from penstock.arrow.columns cimport byte_access
from penstock.wire cimport layout, octets

cdef int _ROWS
cdef int _WIDTH
cdef int _RECORD_BYTES_MAX
cdef int _STORE_AT
cdef int _BODY
cdef int _TOPIC
cdef int _UNIQUE
cdef int _TAGS
cdef int _PROPERTIES_END
cdef int _SLACK
cdef int _RARE
cdef int _NEW_NAMES
cdef int _COUNT
cdef int _PROPERTIES_FULL
cdef int _DISTANCE_MAX
cdef int _COMPRESSED
cdef int _NOT_PLAIN
cdef int _TRANSACTION
cdef int _PREPARED
cdef int _ROLLBACK
cdef int _CACHE_SIZE
cdef int _UNWANTED
cdef int _WANTED
cdef int _NOT_ASCII

@cython.final
cdef class RecordChunk:
    cdef const unsigned char[::1] source
    cdef readonly Py_ssize_t base
    cdef readonly int rows
    cdef readonly int property_count
    cdef readonly long long weight
    cdef readonly bint rare
    cdef readonly bint same_names
    cdef readonly bint same_topic
    cdef readonly bint full
    cdef int[::1] places
    cdef int[::1] spans
    cdef unsigned long long[::1] _parse_state
    cdef bint _body
    cdef bint _topic
    cdef bint _properties
    cdef long long _row_bytes
    cdef long long _rows_max
    cdef long long _weight_max
    cdef public long long offset
    cdef tuple _tags
    cdef bint _needs_properties
    cdef object _topics
    cdef long long _first_ms
    cdef long long _until_ms
    cdef bint _check_crc
    cdef list _cached_topics
    cdef bytearray _cached_matches
    cdef unsigned int _last_slot

    cpdef int set_filter(self, object topics, tuple tags, bint check_crc) except -1
    cpdef int set_period(self, long long first_ms, long long until_ms) except -1
    cdef int set_limits(self, long long rows, long long weight, long long row_bytes) except -1
    cpdef int bind(self, const unsigned char[::1] source) except -1
    cdef int clear(self) except -1
    @cython.locals(size=int, offset="long long")
    cdef Py_ssize_t walk_answer(self, Py_ssize_t at, Py_ssize_t end, long long until) except -1
    @cython.locals(size=int, topic_match=int)
    cdef Py_ssize_t walk_log(self, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit,
                             long long log_offset) except -1
    cdef int _begin(self, Py_ssize_t at) except -1
    cdef bint _is_full(self, Py_ssize_t at) noexcept
    @cython.locals(left="Py_ssize_t", size=int, magic=int, sys_flag=int, row="Py_ssize_t",
                   place="Py_ssize_t", length=int, prefix=int)
    cdef int _locate(self, Py_ssize_t at, Py_ssize_t end) noexcept
    @cython.locals(transaction=int, store_at="Py_ssize_t", stored_ms="long long")
    cdef bint _is_visible(self, Py_ssize_t at) noexcept
    @cython.locals(row="Py_ssize_t", text_at="Py_ssize_t", end="Py_ssize_t")
    cdef bint _is_damaged(self, Py_ssize_t at) noexcept
    @cython.locals(row="Py_ssize_t", crc=int)
    cdef bint _matches_crc(self, Py_ssize_t at) noexcept
    @cython.locals(row="Py_ssize_t", text_at="Py_ssize_t", length=int, count=int)
    cdef bint _add_row(self, Py_ssize_t at, int size) except -1
    @cython.locals(at="Py_ssize_t", length=int, tag=bytes)
    cdef bint _is_tagged(self, Py_ssize_t row) except -1
    @cython.locals(row="Py_ssize_t")
    cdef int _row_topic_match(self) except -1
    cdef bint wants(self, Py_ssize_t topic_at, int length) except -1
    @cython.locals(slot="unsigned int")
    cdef int topic_match(self, Py_ssize_t at, int length) except -1
    @cython.locals(known=bytes)
    cdef bint _is_cached(self, unsigned int slot, Py_ssize_t at, int length) except -1
    @cython.locals(topic=bytes, topic_match=int)
    cdef int _match_topic(self, unsigned int slot, Py_ssize_t at, int length) except -1
