cimport cython
from penstock.arrow.columns cimport byte_access
from penstock.arrow.columns.arrays cimport Column, TextColumn
from penstock.arrow.columns.record_chunk cimport RecordChunk
from penstock.arrow.columns.record_view cimport RecordView
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
cdef int _PROPERTIES_END
cdef int _WIDTH
cdef int _NAMES
cdef int _VALUES
cdef int _SPAN_WIDTH

@cython.final
cdef class RowBatch:
    cdef readonly long long rows
    cdef readonly long long size
    cdef RecordView _found
    cdef object _schema
    cdef list _order
    cdef int _topic_length
    cdef int _broker_length
    cdef TextColumn _topic
    cdef TextColumn _broker
    cdef TextColumn _message_id
    cdef TextColumn _tags
    cdef TextColumn _keys
    cdef TextColumn _body
    cdef TextColumn _born_host
    cdef TextColumn _store_host
    cdef TextColumn _offset_id
    cdef TextColumn _transaction_id
    cdef Column _properties
    cdef TextColumn _property_names
    cdef TextColumn _property_values
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
    cpdef bint fits(self, long long record_bytes) noexcept
    cpdef bint add(self, RecordView record) except -1
    cdef bint _put_decompressed(self, RecordView record) except -1
    @cython.locals(at="Py_ssize_t")
    cdef int _put_numbers(self, RecordView record) except -1
    cdef int _put_texts(self, RecordView record) except -1
    cdef int _put_topic(self, RecordView record) except -1
    cdef int _put_properties(self, RecordView record) except -1
    @cython.locals(level="long long", due_ms="long long")
    cdef int _put_delays(self, RecordView record) except -1
    @cython.locals(at="Py_ssize_t")
    cdef int _put_rare(self, RecordView record) except -1
    @cython.locals(at="Py_ssize_t")
    cdef int _put_hosts(self, RecordView record) except -1
    cdef int _put_transaction_id(self, RecordView record) except -1
    @cython.locals(length=int, at="Py_ssize_t")
    cdef int _put_offset_id(self, TextColumn column, RecordView record) except -1
    @cython.locals(rows="Py_ssize_t")
    cdef int add_chunk(self, RecordChunk chunk) except -1
    @cython.locals(record=RecordView, at="Py_ssize_t", problem=int)
    cdef RecordView _view_of(self, RecordChunk chunk, Py_ssize_t row)
    @cython.locals(source="const unsigned char[::1]", base="Py_ssize_t", places="int[::1]",
                   rows="Py_ssize_t", at="Py_ssize_t")
    cdef int _put_many_numbers(self, RecordChunk chunk) except -1
    @cython.locals(base="Py_ssize_t", places="int[::1]", rows="Py_ssize_t")
    cdef int _put_many_texts(self, RecordChunk chunk) except -1
    @cython.locals(before="Py_ssize_t", property_count="Py_ssize_t", row="Py_ssize_t")
    cdef int _put_many_properties(self, RecordChunk chunk) except -1
    @cython.locals(row="Py_ssize_t", at="Py_ssize_t")
    cdef int _put_message_ids(self, RecordChunk chunk) except -1
    @cython.locals(row="Py_ssize_t", record=RecordView)
    cdef int _put_many_delays(self, RecordChunk chunk) except -1
    @cython.locals(source="const unsigned char[::1]", base="Py_ssize_t", places="int[::1]",
                   rows="Py_ssize_t", row="Py_ssize_t", record=RecordView, at="Py_ssize_t")
    cdef int _put_many_rare(self, RecordChunk chunk) except -1
    cdef int _update_size(self) except -1

cdef long long _to_micros(long long ms) noexcept
@cython.locals(limit="long long")
cdef long long _due_ms(long long born_ms, long long delay, int unit_ms) noexcept
cdef int _put_host(TextColumn column, RecordView record, Py_ssize_t at, Py_ssize_t length) except -1
@cython.locals(place="Py_ssize_t", i=int)
cdef int _put_ipv4(TextColumn column, RecordView record, Py_ssize_t at) except -1
