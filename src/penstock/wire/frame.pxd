cimport cython
from penstock.wire cimport octets
from penstock.wire.fields cimport Fields
from penstock.wire.json_header cimport JsonHeader

cdef int _JSON
cdef int _BINARY
cdef int _BINARY_BYTES_MIN

cdef class Request(Fields):
    cdef readonly int frame_bytes_max
    cdef readonly int header_bytes_max
    cdef readonly int encoding
    cdef readonly Py_ssize_t body_at
    cdef readonly Py_ssize_t body_length
    cdef readonly Py_ssize_t missing
    cdef JsonHeader _json

    @cython.locals(have="Py_ssize_t", length=int, mark=int, header_length=int, encoding=int)
    cpdef Py_ssize_t read(self, Py_ssize_t at, Py_ssize_t end) except -1
    cpdef void release(self)
    @cython.locals(length=int, key_length=int, key_at=int)
    cdef int _read_binary(self, int at, int end) except -1
    cdef int _check_length(self, int length) except -1
    cdef int _refuse_header(self, int header_length, int length) except -1
