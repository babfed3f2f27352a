cimport cython
from penstock.store.get cimport Reader
from penstock.wire cimport layout, octets
from penstock.wire.output cimport Output

cdef int _SUCCESS
cdef int _NORMAL
cdef int _NUMBER_BYTES
cdef int _BLANK
cdef int _COMMA
cdef int _SEMICOLON

cdef class FoundBatch:
    cdef int queue_id
    cdef long long start_offset
    cdef long long next_offset
    cdef int count
    cdef Py_ssize_t at
    cdef Py_ssize_t length
    cdef int first
    cdef long long log_offset
    cdef long long stored_ms
    cdef bint given

cdef class PopBatches:
    cdef readonly list batches
    cdef readonly int batch_count
    cdef readonly int count
    cdef readonly long long size
    cdef Output _bodies
    cdef long long[::1] _offsets
    cdef Output _text

    cpdef int clear(self) except -1
    @cython.locals(bodies=Output, at="Py_ssize_t", total="long long", batch=FoundBatch)
    cpdef bint add(self, Reader reader, int queue_id, long long offset) except -1
    @cython.locals(view="unsigned char[::1]", at="Py_ssize_t", end="Py_ssize_t", sys_flag=int,
                   size=int, log_offset="long long")
    cdef bint _read_records(self, FoundBatch batch) except -1
    @cython.locals(first="long long", index=int)
    cpdef object offsets_of(self, FoundBatch batch)
    @cython.locals(total="Py_ssize_t", text=Output, number=int, index=int, batch=FoundBatch,
                   starts="Py_ssize_t")
    cpdef int write(self, Output output, int encoding, int opaque, long long pop_ms,
                    long long invisible_ms, int revive_queue_id, long long rest) except -1
    cdef int _put_queue(self, FoundBatch batch, bint separated) except -1
    @cython.locals(text=Output)
    cdef int _put_byte(self, int byte) except -1
    @cython.locals(text=Output)
    cdef int _put_number(self, long long number) except -1
