cimport cython
from penstock.spark.arrow cimport byte_access
from penstock.spark.arrow.arrays cimport Column, Texts
from penstock.spark.arrow.record_chunk cimport Chunk
from penstock.spark.arrow.record_view cimport PlacedRecord
from penstock.wire cimport layout, octets

cdef long long _COLUMN_BYTES_MAX
cdef int _COMPRESSED
cdef long long _NO_NUMBER
cdef int _SLACK
cdef long long _MS_MAX
cdef long long _I32_MAX
cdef int _DOT
cdef int _COLON
cdef int _ID_BYTES_MAX
cdef int _IPV4_BYTES_MAX
cdef int _AT
cdef int _STORE_AT
cdef int _BODY
cdef int _TOPIC
cdef int _UNIQUE
cdef int _TAGS
cdef int _KEYS
cdef int _PIECES_END
cdef int _WIDTH
cdef int _NAMES
cdef int _CONTENTS
cdef int _SPAN

@cython.final
cdef class RowBatch:
    cdef readonly long long rows
    cdef readonly long long size
    cdef PlacedRecord _found
    cdef object _schema
    cdef list _order
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
    cdef bint _hosts
    cdef bint _rare
    cdef readonly bint needs_distinct
    cdef readonly bint needs_body
    cdef readonly bint needs_topic
    cdef readonly bint needs_properties
    cdef long long _row_bytes
    cdef readonly long long row_bytes_max

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
    @cython.locals(at="Py_ssize_t")
    cdef int _put_hosts(self, PlacedRecord record) except -1
    cdef int _put_transaction_id(self, PlacedRecord record) except -1
    @cython.locals(length=int, at="Py_ssize_t")
    cdef int _put_offset_id(self, Texts column, PlacedRecord record) except -1
    @cython.locals(rows="Py_ssize_t")
    cdef int add_chunk(self, Chunk chunk) except -1
    @cython.locals(record=PlacedRecord, at="Py_ssize_t", problem=int)
    cdef PlacedRecord _find(self, Chunk chunk, Py_ssize_t row)
    @cython.locals(source="const unsigned char[::1]", base="Py_ssize_t", places="int[::1]",
                   rows="Py_ssize_t", at="Py_ssize_t")
    cdef int _put_many_numbers(self, Chunk chunk) except -1
    @cython.locals(base="Py_ssize_t", places="int[::1]", rows="Py_ssize_t")
    cdef int _put_many_texts(self, Chunk chunk) except -1
    @cython.locals(before="Py_ssize_t", pieces="Py_ssize_t", row="Py_ssize_t")
    cdef int _put_many_properties(self, Chunk chunk) except -1
    @cython.locals(row="Py_ssize_t", at="Py_ssize_t")
    cdef int _put_mixed_ids(self, Chunk chunk) except -1
    @cython.locals(row="Py_ssize_t", record=PlacedRecord)
    cdef int _put_many_delays(self, Chunk chunk) except -1
    @cython.locals(source="const unsigned char[::1]", base="Py_ssize_t", places="int[::1]",
                   rows="Py_ssize_t", row="Py_ssize_t", record=PlacedRecord, at="Py_ssize_t")
    cdef int _put_many_rare(self, Chunk chunk) except -1
    cdef int _weigh(self) except -1

cdef long long _micros(long long ms) noexcept
@cython.locals(limit="long long")
cdef long long _after(long long born_ms, long long delay, int unit_ms) noexcept
cdef int _put_host(Texts column, PlacedRecord record, Py_ssize_t at, Py_ssize_t length) except -1
@cython.locals(place="Py_ssize_t", i=int)
cdef int _put_ipv4(Texts column, PlacedRecord record, Py_ssize_t at) except -1
