cimport cython
from penstock.arrow.columns.record_batch cimport RowBatch
from penstock.arrow.columns.record_chunk cimport RecordChunk
from penstock.arrow.columns.record_view cimport RecordView
from penstock.wire cimport layout, octets

cdef int _DONE
cdef int _FULL
cdef int _BAD
cdef int _BLANK
cdef int _UNWRITTEN
cdef int _CUT
cdef int _CRC
cdef int _ELSEWHERE
cdef int _LENGTHS
cdef int _MAGIC
cdef int _WRAPPED
cdef int _TRANSACTION
cdef int _PREPARED
cdef int _ROLLBACK
cdef long long _CHUNKED_BYTES_MAX

@cython.final
cdef class ColumnBuilder:
    cdef readonly Py_ssize_t position
    cdef readonly long long offset
    cdef readonly Py_ssize_t resume
    cdef readonly str problem
    cdef long long _rows_max
    cdef long long _bytes_max
    cdef RecordView _record
    cdef RowBatch _batch
    cdef RecordChunk _chunk
    cdef tuple _tags
    cdef long long _first_ms
    cdef long long _until_ms
    cdef bint _check_crc

    cdef int _bind(self, const unsigned char[::1] view) except -1
    @cython.locals(record=RecordView, why=int, problem=int, size=int, offset="long long",
                   wrapped=bint)
    cdef int _walk_answer(self, Py_ssize_t at, Py_ssize_t end, long long first,
                          long long until) except -1
    @cython.locals(record=RecordView, why=int, problem=int, size=int)
    cdef int _walk_log(self, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit,
                       long long log_offset) except -1
    @cython.locals(record=RecordView, left="Py_ssize_t", size=int, magic=int, problem=int,
                   offset="long long")
    cdef int _parse_logged(self, Py_ssize_t at, Py_ssize_t limit, long long log_offset) except -1
    @cython.locals(record=RecordView, transaction=int, stored_ms="long long")
    cdef bint _is_wanted(self) except -1
    @cython.locals(record=RecordView, at="Py_ssize_t")
    cdef int _find_damage(self, long long physical_offset) except -1
    cdef int _bad(self, str problem) except -1
    @cython.locals(chunk=RecordChunk)
    cdef Py_ssize_t _add_plain_answer(self, Py_ssize_t at, Py_ssize_t end, long long until) except -1
    @cython.locals(chunk=RecordChunk)
    cdef Py_ssize_t _add_plain_log(self, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit,
                              long long log_offset) except -1
    @cython.locals(batch=RowBatch, rows="long long", weight="long long")
    cdef bint _set_chunk_limits(self) except -1
    cdef int _flush(self) except -1
    @cython.locals(record=RecordView)
    cdef int _add_checked(self, bint wrapped, long long until) except -1
    @cython.locals(record=RecordView, batch=RowBatch)
    cdef int _add(self) except -1
    @cython.locals(batch=RowBatch)
    cdef bint _is_full(self, long long size) except -1
    @cython.locals(record=RecordView, source="const unsigned char[::1]", size=int, bad=list)
    cdef int _add_inner(self, Py_ssize_t at, long long until) except -1
    @cython.locals(record=RecordView, batch=RowBatch, at="Py_ssize_t", problem=int,
                   offset="long long")
    cdef int _add_inner_records(self, Py_ssize_t end, long long until) except -1
