cimport cython
from penstock.spark.arrow cimport byte_access
from penstock.spark.arrow.record_view cimport PlacedRecord
from penstock.wire cimport octets

cdef int _SLACK
cdef int _ROWS_MIN
cdef int _DATA_MIN

cdef object _grown(unsigned char[::1] old, Py_ssize_t used, Py_ssize_t room)

@cython.final
cdef class Column:
    cdef readonly bint on
    cdef readonly int width
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t nulls
    cdef readonly Py_ssize_t room
    cdef readonly Py_ssize_t room_next
    cdef unsigned char[::1] _nothing
    cdef unsigned char[::1] values
    cdef unsigned char[::1] valid
    cdef object values_buffer
    cdef object valid_buffer

    cdef int put(self, long long value) except -1
    cdef int put_null(self) except -1
    cdef int close(self, long long end) except -1
    cdef int close_null(self, long long end) except -1
    cdef int _note_null(self) except -1
    cdef int _note_nulls(self, Py_ssize_t count) except -1
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
    cdef int close_nulls(self, long long end, Py_ssize_t count) except -1
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
    cdef unsigned char[::1] _nothing
    cdef unsigned char[::1] data
    cdef object data_buffer

    cdef int put(self, Py_ssize_t at, Py_ssize_t length) except -1
    @cython.locals(offsets=Column)
    cdef int put_pieces(self, PlacedRecord record, int part) except -1
    @cython.locals(offsets=Column, first="Py_ssize_t", end="Py_ssize_t")
    cdef int put_many(self, Py_ssize_t base, int[::1] places, Py_ssize_t at, Py_ssize_t step,
                      Py_ssize_t count, bint null) except -1
    @cython.locals(offsets=Column, first="Py_ssize_t", begin="Py_ssize_t", length="Py_ssize_t")
    cdef int repeat(self, Py_ssize_t count, Py_ssize_t times) except -1
    cdef int put_nulls(self, Py_ssize_t count) except -1
    cdef int put_bytes(self, bytes text) except -1
    cdef int put_null(self) except -1
    cdef int reserve(self, Py_ssize_t length) except -1
    cdef int close(self, Py_ssize_t length) except -1
    cdef int _grow(self, Py_ssize_t length) except -1
    @cython.locals(count="Py_ssize_t")
    cpdef object finish(self, object kind)
    cdef int forget(self) except -1
