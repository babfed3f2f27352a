cimport cython
from penstock.client.producer.send_codec cimport PendingSend, SendTarget, encode_properties, plain_text, put_send
from penstock.transport.pending_calls cimport PendingCalls

cdef long long _UNSENT_BYTES_MAX
cdef long long _SLOW_MS
cdef object _OK

cdef class FlushGroup:
    cdef public long long count
    cdef public object done

cdef class InFlightCounter:
    cdef public long long count
    cdef public long long byte_count
    cdef readonly long long count_max
    cdef readonly long long bytes_max
    cdef public FlushGroup flush_group
    cdef public bint has_waiters

    @cython.locals(flush_group=FlushGroup)
    cpdef FlushGroup add(self, Py_ssize_t length)
    cpdef object remove(self, FlushGroup flush_group, Py_ssize_t length)
    cpdef object raise_full(self)
    cpdef object wake_waiter(self)

cdef class RoundRobin:
    cdef readonly tuple targets
    cdef readonly tuple queues
    cdef readonly Py_ssize_t count
    cdef readonly bint single_broker
    cdef public long long position

    @cython.locals(position="Py_ssize_t")
    cpdef SendTarget next(self, object faults, str last_broker)

cdef class FastPath:
    cdef readonly object clock
    cdef readonly InFlightCounter counter
    cdef readonly object faults
    cdef readonly long long timeout_ms
    cdef public bint retry_not_stored
    cdef readonly dict publish_infos
    cdef readonly dict deferred_counts
    cdef readonly set faulty_brokers
    cdef public bint open
    cdef public long pid
    cdef public object loop
    cdef public object packer
    cdef public object create_future
    cdef public object tracer

    @cython.locals(pending=PendingSend)
    cpdef object start_send(self, object message, object select, object ordering_key,
                            object timeout_ms, bint internal, bint traced)
    @cython.locals(pending=PendingSend, message_id=str, more=bytes)
    cpdef PendingSend make_pending(self, object message, object ordering_key, object timeout_ms,
                                   bint internal)
    @cython.locals(limit_ms="long long")
    cpdef PendingSend new_pending(self, object message, str topic, object timeout_ms)
    @cython.locals(round_robin=RoundRobin, target=SendTarget, calls=PendingCalls, flush_group=FlushGroup)
    cpdef object write_or_defer(self, PendingSend pending)
    @cython.locals(opaque=int)
    cpdef object write_request(self, PendingCalls calls, PendingSend pending, SendTarget target)
    cpdef object write_frame(self, PendingCalls calls, PendingSend pending, SendTarget target,
                             int opaque, int command_flag)
    @cython.locals(latency_ms="long long", target=SendTarget, flush_group=FlushGroup)
    cpdef object send_succeeded(self, PendingSend pending, object result, object status)
    cpdef object send_failed(self, PendingSend pending, object error)
    cpdef object raise_unusable(self)
    cpdef object defer(self, PendingSend pending)
    cpdef object write_signed(self, PendingSend pending, SendTarget target, int opaque,
                              int command_flag)
    cpdef object report_latency(self, PendingSend pending, long long latency_ms)
    cpdef bint retry_if_not_stored(self, PendingSend pending, object result, object status) except -1
    cpdef object trace(self, PendingSend pending, object result)

cpdef object connection_of(SendTarget target)
cdef long long unsent_bytes(SendTarget target) except -1
