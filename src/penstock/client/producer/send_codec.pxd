cimport cython
from penstock.transport.pending_calls cimport Call
from penstock.wire cimport layout, octets
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SEND_MESSAGE_V2
cdef int _JOIN_BYTES_MAX
cdef int _LANGUAGE
cdef int _VERSION
cdef int _BINARY_MARK
cdef int _HEAD_BYTES
cdef int _NUMBERS_BYTES
cdef int _PROPERTIES_BYTES_MAX
cdef dict _STATUSES
cdef object _OK
cdef object _RESERVED

cdef class Line:
    cdef readonly object queue
    cdef readonly str broker_name
    cdef readonly int queue_id
    cdef readonly dict fields
    cdef readonly bytes fixed
    cdef readonly object peer
    cdef readonly bint signs

cdef class Flight(Call):
    cdef public object owner
    cdef public object future
    cdef public object message
    cdef public str topic
    cdef public long long began_ms
    cdef public bytes body
    cdef public bytes properties
    cdef public bytes extra
    cdef public int flag
    cdef public int sys_flag
    cdef public str message_id
    cdef public list ids
    cdef public Line line
    cdef public object choice
    cdef public bint late
    cdef public list attempts
    cdef public object fallback
    cdef public object wave
    cdef public bint traced
    cdef public bint trace_on

    cpdef dict fields(self, Line line)
    @cython.locals(line=Line)
    cpdef object answered(self, Request request)
    cpdef object failed(self, object error)

@cython.locals(fixed=bytes, properties=bytes, extra=bytes, body=bytes, body_length="Py_ssize_t",
               joins=bint, start="Py_ssize_t", at="Py_ssize_t")
cpdef bint put_send(Output output, Flight flight, Line line, int opaque,
                    int command_flag) except -1
@cython.locals(length=int)
cdef Py_ssize_t _put_number(unsigned char[::1] view, Py_ssize_t at, int letter, long long value)

@cython.locals(size="Py_ssize_t", at="Py_ssize_t", data=bytearray, view="unsigned char[::1]")
cpdef bytes encode_batched(bytes body, int flag, bytes properties)

@cython.locals(text=bytes)
cpdef bytes encode_properties(object message, str message_id, bytes more, bint internal)
@cython.locals(encoded=bytes)
cdef bytes _own_property(object name, object value, bint internal)
cpdef str plain_text(str what, object value)
@cython.locals(encoded=bytes)
cdef bytes _property(bytes name, str value)
cdef object _separator(str name)

@cython.locals(queue_id=int)
cdef object _receipt(Request request, Line line, str message_id, object status)
@cython.locals(queue_id=int, first="long long")
cdef list _receipts(Request request, Line line, list ids, object status)
cdef str _text(Request request, bytes name)
