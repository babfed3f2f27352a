cimport cython
from penstock.arrow.columns cimport byte_access
from penstock.arrow.columns.record_view cimport RecordView
from penstock.wire cimport octets

cdef int _SLACK
cdef int _ROWS_MIN
cdef int _DATA_MIN

cdef object _grow_buffer(unsigned char[::1] old, Py_ssize_t used, Py_ssize_t capacity)

@cython.final
cdef class Column:
    cdef readonly bint enabled
    cdef readonly int width
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t nulls
    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t next_capacity
    cdef unsigned char[::1] _empty
    cdef unsigned char[::1] values
    cdef unsigned char[::1] valid
    cdef object values_buffer
    cdef object valid_buffer

    cdef int put(self, long long value) except -1
    cdef int put_null(self) except -1
    cdef int end_row(self, long long end) except -1
    cdef int end_null_row(self, long long end) except -1
    cdef int _count_null(self) except -1
    cdef int _count_nulls(self, Py_ssize_t count) except -1
    cdef int reserve(self, Py_ssize_t count) except -1
    cdef int add(self, Py_ssize_t count) except -1
    @cython.locals(zeros="Py_ssize_t")
    cdef int add_or_null(self, int[::1] lengths, Py_ssize_t at, Py_ssize_t step,
                         Py_ssize_t count) except -1
    cdef int put_many(self, const unsigned char[::1] source, Py_ssize_t base, int[::1] places,
                      Py_ssize_t at, Py_ssize_t step, Py_ssize_t count) except -1
    cdef int scale(self, long long limit, long long factor, Py_ssize_t count) except -1
    cdef int put_nulls(self, Py_ssize_t count) except -1
    @cython.locals(row="Py_ssize_t")
    cdef int end_null_rows(self, long long end, Py_ssize_t count) except -1
    @cython.locals(before="Py_ssize_t", used="Py_ssize_t")
    cdef int grow(self) except -1
    @cython.locals(length="Py_ssize_t")
    cdef int _make_bitmap(self, Py_ssize_t used) except -1
    cdef list buffers(self, Py_ssize_t values)
    cpdef object finish(self, object kind)
    cdef int reset(self) except -1

@cython.final
cdef class TextColumn:
    cdef readonly bint enabled
    cdef readonly Column offsets
    cdef const unsigned char[::1] source
    cdef readonly Py_ssize_t used
    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t next_capacity
    cdef unsigned char[::1] _empty
    cdef unsigned char[::1] data
    cdef object data_buffer

    cdef int put(self, Py_ssize_t at, Py_ssize_t length) except -1
    @cython.locals(offsets=Column)
    cdef int put_properties(self, RecordView record, int part) except -1
    @cython.locals(offsets=Column, first="Py_ssize_t", end="Py_ssize_t")
    cdef int put_many(self, Py_ssize_t base, int[::1] places, Py_ssize_t at, Py_ssize_t step,
                      Py_ssize_t count, bint null) except -1
    @cython.locals(offsets=Column, first="Py_ssize_t", begin="Py_ssize_t", length="Py_ssize_t")
    cdef int repeat(self, Py_ssize_t count, Py_ssize_t times) except -1
    cdef int put_nulls(self, Py_ssize_t count) except -1
    cdef int put_bytes(self, bytes text) except -1
    cdef int put_null(self) except -1
    cdef int reserve(self, Py_ssize_t length) except -1
    cdef int end_row(self, Py_ssize_t length) except -1
    cdef int _grow(self, Py_ssize_t length) except -1
    @cython.locals(count="Py_ssize_t")
    cpdef object finish(self, object kind)
    cdef int reset(self) except -1
