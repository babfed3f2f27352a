cimport cython
from penstock.client.producer.send_codec cimport Flight, Line, encode_properties, plain_text, put_send
from penstock.transport.pending_calls cimport PendingCalls

cdef long long _UNSENT_BYTES_MAX
cdef long long _SLOW_MS
cdef object _OK

cdef class Wave:
    cdef public long long count
    cdef public object over

cdef class Tally:
    cdef public long long count
    cdef public long long size
    cdef readonly long long count_max
    cdef readonly long long size_max
    cdef public Wave wave
    cdef public bint waiting

    @cython.locals(wave=Wave)
    cpdef Wave enter(self, Py_ssize_t length)
    cpdef object leave(self, Wave wave, Py_ssize_t length)
    cpdef object refuse(self)
    cpdef object wake(self)

cdef class Ring:
    cdef readonly tuple lines
    cdef readonly tuple queues
    cdef readonly Py_ssize_t count
    cdef readonly bint alone
    cdef public long long turn

    cpdef Line next(self, object faults, str last_broker)

cdef class Launcher:
    cdef readonly object clock
    cdef readonly Tally tally
    cdef readonly object faults
    cdef public object tracer
    cdef readonly long long timeout_ms
    cdef public bint open
    cdef public long pid
    cdef public object loop
    cdef public object packer
    cdef public object create_future
    cdef readonly dict topics_known
    cdef readonly dict waiting
    cdef readonly set troubled
    cdef public bint retry_not_stored

    @cython.locals(flight=Flight)
    cpdef object launch(self, object message, object choice, object ordering_key,
                        object timeout_ms, bint internal, bint traced)
    @cython.locals(flight=Flight, message_id=str, more=bytes)
    cpdef Flight make_flight(self, object message, object ordering_key, object timeout_ms,
                             bint internal)
    @cython.locals(limit_ms="long long")
    cpdef Flight empty_flight(self, object message, str topic, object timeout_ms)
    @cython.locals(ring=Ring, line=Line, calls=PendingCalls)
    cpdef object depart(self, Flight flight)
    @cython.locals(opaque=int)
    cpdef object write(self, PendingCalls calls, Flight flight, Line line)
    cpdef object put(self, PendingCalls calls, Flight flight, Line line, int opaque, int command_flag)
    @cython.locals(latency_ms="long long", line=Line)
    cpdef object landed(self, Flight flight, object result, object status)
    cpdef object crashed(self, Flight flight, object error)
    cpdef object refuse(self)
    cpdef object depart_later(self, Flight flight)
    cpdef object put_signed(self, Flight flight, Line line, int opaque, int command_flag)
    cpdef object recovered(self, Flight flight, long long latency_ms)
    cpdef bint not_stored(self, Flight flight, object result, object status) except -1
    cpdef object trace(self, Flight flight, object result)
