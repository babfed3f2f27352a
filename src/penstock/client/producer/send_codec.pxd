cimport cython
from penstock.transport.pending_calls cimport Call
from penstock.wire cimport layout, octets
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _SEND_MESSAGE_V2
cdef int _INLINE_BODY_BYTES_MAX
cdef int _LANGUAGE
cdef int _VERSION
cdef int _BINARY_MARK
cdef int _HEAD_BYTES
cdef int _NUMBERS_BYTES
cdef int _PROPERTIES_BYTES_MAX
cdef dict _STATUSES
cdef object _OK
cdef object _RESERVED

cdef class SendTarget:
    cdef readonly object queue
    cdef readonly str broker_name
    cdef readonly int queue_id
    cdef readonly dict fields
    cdef readonly bytes encoded
    cdef readonly object peer
    cdef readonly bint signs

cdef class PendingSend(Call):
    cdef public object owner
    cdef public object future
    cdef public object message
    cdef public str topic
    cdef public long long born_ms
    cdef public bytes body
    cdef public bytes properties
    cdef public bytes extra_fields
    cdef public int flag
    cdef public int sys_flag
    cdef public str message_id
    cdef public list batch_ids
    cdef public SendTarget target
    cdef public object select
    cdef public bint deferred
    cdef public bint uncompressed
    cdef public list failures
    cdef public object fallback
    cdef public object flush_group
    cdef public bint traced
    cdef public bint trace_on

    cpdef dict fields(self, SendTarget target)
    @cython.locals(target=SendTarget)
    cpdef object answered(self, Request request)
    cpdef object failed(self, object error)

@cython.locals(encoded=bytes, properties=bytes, extra_fields=bytes, body=bytes, body_length="Py_ssize_t",
               inline_body=bint, start="Py_ssize_t", at="Py_ssize_t")
cpdef bint put_send(Output output, PendingSend pending, SendTarget target, int opaque,
                    int command_flag) except -1
@cython.locals(length=int)
cdef Py_ssize_t _put_number_field(unsigned char[::1] view, Py_ssize_t at, int letter, long long value)

@cython.locals(size="Py_ssize_t", at="Py_ssize_t", data=bytearray, view="unsigned char[::1]")
cpdef bytes encode_batched(bytes body, int flag, bytes properties)

@cython.locals(text=bytes)
cpdef bytes encode_properties(object message, str message_id, bytes more, bint internal)
@cython.locals(encoded=bytes)
cdef bytes _application_property(object name, object value, bint internal)
cpdef str plain_text(str what, object value)
@cython.locals(encoded=bytes)
cdef bytes _property(bytes name, str value)
cdef object _separator_error(str name)

@cython.locals(queue_id=int)
cdef object _receipt(Request request, SendTarget target, str message_id, object status)
@cython.locals(queue_id=int, first="long long")
cdef list _receipts(Request request, SendTarget target, list ids, object status)
cdef str _text(Request request, bytes name)
