cimport cython
from penstock.spark cimport cells
from penstock.spark.placed cimport PlacedRecord
from penstock.wire cimport octets

cdef long long _COLUMN_BYTES_MAX
cdef int _COMPRESSED
cdef long long _NO_NUMBER
cdef int _SLACK
cdef int _ROWS_MIN
cdef int _DATA_MIN
cdef long long _MS_MAX
cdef long long _I32_MAX
cdef int _DOT
cdef int _COLON
cdef int _ID_BYTES_MAX
cdef int _IPV4_BYTES_MAX

@cython.locals(view="unsigned char[::1]")
cdef object _grown(unsigned char[::1] old, Py_ssize_t used, Py_ssize_t room)

@cython.final
cdef class Column:
    cdef readonly bint on
    cdef readonly int width
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t nulls
    cdef readonly Py_ssize_t room
    cdef readonly Py_ssize_t room_next
    cdef unsigned char[::1] values
    cdef unsigned char[::1] valid
    cdef object values_buffer
    cdef object valid_buffer

    cdef int put(self, long long value) except -1
    cdef int put_null(self) except -1
    cdef int close(self, long long end) except -1
    cdef int close_null(self, long long end) except -1
    @cython.locals(row="Py_ssize_t")
    cdef int _note_null(self) except -1
    @cython.locals(before="Py_ssize_t", used="Py_ssize_t")
    cdef int grow(self) except -1
    @cython.locals(length="Py_ssize_t")
    cdef int _make_bitmap(self, Py_ssize_t used) except -1
    cdef list buffers(self, Py_ssize_t values)
    cpdef object finish(self, object kind)
    cdef int forget(self) except -1

@cython.final
cdef class Texts:
    cdef readonly bint on
    cdef readonly Column offsets
    cdef const unsigned char[::1] source
    cdef readonly Py_ssize_t used
    cdef readonly Py_ssize_t room
    cdef readonly Py_ssize_t room_next
    cdef unsigned char[::1] data
    cdef object data_buffer

    cdef int put(self, Py_ssize_t at, Py_ssize_t length) except -1
    @cython.locals(offsets=Column)
    cdef int put_pieces(self, PlacedRecord record, int part) except -1
    cdef int put_bytes(self, bytes text) except -1
    cdef int put_null(self) except -1
    cdef int reserve(self, Py_ssize_t length) except -1
    cdef int close(self, Py_ssize_t length) except -1
    cdef int _grow(self, Py_ssize_t length) except -1
    @cython.locals(count="Py_ssize_t")
    cpdef object finish(self, object kind)
    cdef int forget(self) except -1

@cython.final
cdef class RowBatch:
    cdef readonly long long rows
    cdef readonly long long size
    cdef object _schema
    cdef int _topic_length
    cdef int _broker_length
    cdef Texts _topic
    cdef Texts _broker
    cdef Texts _message_id
    cdef Texts _tags
    cdef Texts _keys
    cdef Texts _body
    cdef Texts _born_host
    cdef Texts _store_host
    cdef Texts _offset_id
    cdef Texts _transaction_id
    cdef Column _properties
    cdef Texts _names
    cdef Texts _contents
    cdef Column _queue_id
    cdef Column _reconsume_times
    cdef Column _flag
    cdef Column _sys_flag
    cdef Column _delay_level
    cdef Column _queue_offset
    cdef Column _log_offset
    cdef Column _born
    cdef Column _store
    cdef Column _deliver
    cdef bint _delays
    cdef bint _rare
    cdef readonly bint needs_distinct
    cdef readonly bint needs_properties
    cdef long long _row_bytes

    cpdef int bind(self, const unsigned char[::1] source) except -1
    cdef int _bind_text(self, const unsigned char[::1] text) except -1
    cpdef bint has_room(self, long long record_bytes) noexcept
    cpdef bint add(self, PlacedRecord record) except -1
    cdef bint _put_unpacked(self, PlacedRecord record) except -1
    @cython.locals(at="Py_ssize_t")
    cdef int _put_numbers(self, PlacedRecord record) except -1
    cdef int _put_texts(self, PlacedRecord record) except -1
    cdef int _put_topic(self, PlacedRecord record) except -1
    cdef int _put_properties(self, PlacedRecord record) except -1
    @cython.locals(level="long long", due_ms="long long")
    cdef int _put_delays(self, PlacedRecord record) except -1
    @cython.locals(at="Py_ssize_t")
    cdef int _put_rare(self, PlacedRecord record) except -1
    @cython.locals(length=int)
    cdef int _put_offset_id(self, Texts column, PlacedRecord record) except -1
    cdef int _weigh(self) except -1

cdef long long _micros(long long ms) noexcept
@cython.locals(limit="long long")
cdef long long _after(long long born_ms, long long delay, int unit_ms) noexcept
cdef int _put_host(Texts column, PlacedRecord record, Py_ssize_t at, Py_ssize_t length) except -1
@cython.locals(place="Py_ssize_t", i=int)
cdef int _put_ipv4(Texts column, PlacedRecord record, Py_ssize_t at) except -1
