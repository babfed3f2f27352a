cimport cython
from penstock.broker.flow_counters cimport Deliveries, FlowCounter
from penstock.broker.pull.pull_targets cimport PullTarget, PullTargets
from penstock.store.get cimport Reader
from penstock.store.put cimport StoreWriter
from penstock.wire cimport layout, octets
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _UNUSUAL
cdef int _WRITTEN
cdef int _WAITS
cdef int _FOUND
cdef int _NO_MATCHED_MESSAGE
cdef int _OFFSET_OVERFLOW_ONE
cdef int _NO_MESSAGE_IN_QUEUE
cdef int _COMMIT_OFFSET
cdef int _SUSPEND
cdef long long _SUSPEND_MS_MAX
cdef int _MASTER_ID
cdef int _SUCCESS
cdef int _ONEWAY
cdef long long _INT_MAX

cdef class SuspendedPull:
    cdef readonly PullHandler handler
    cdef readonly PullTarget target
    cdef readonly long long deadline_ms
    cdef public long long offset
    cdef readonly int count_max
    cdef readonly long long bytes_max

    cpdef int write(self, Output output, int encoding, int opaque) except -1

cdef class PullHandler:
    cdef readonly PullTargets targets
    cdef readonly object requests
    cdef object _live
    cdef object _store
    cdef StoreWriter _writer
    cdef object _offsets
    cdef object _stats
    cdef Deliveries _delivered
    cdef object _settings
    cdef long long _count_limit
    cdef long long _bytes_limit
    cdef bint _long_polling
    cdef long long _short_polling_ms
    cdef long long _offset
    cdef int _count_max
    cdef long long _bytes_max
    cdef long long _wait_ms
    cdef long long _commit_offset
    cdef bint _commits
    cdef readonly long long woken_messages

    @cython.locals(flags=int, target=PullTarget, status=int)
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)
    @cython.locals(offset=int, count=int, count_max="long long", field=int, bytes_max="long long")
    cdef bint _read_numbers(self, Request request, int flags) except -1
    @cython.locals(reader=Reader, status=int)
    cdef int _serve(self, PullTarget target, Request request, Output output,
                    long long now_ms) except -1
    @cython.locals(deadline_ms="long long")
    cdef object _suspend(self, PullTarget target, long long now_ms)
    @cython.locals(target=PullTarget, reader=Reader, status=int)
    cpdef int write_woken(self, SuspendedPull suspended, Output output, int encoding,
                          int opaque) except -1
    cdef int _find(self, Reader reader, PullTarget target, long long offset, int count_max,
                   long long bytes_max) except -1
    @cython.locals(before="Py_ssize_t", total="long long", at="Py_ssize_t", sys_flag=int,
                   stored_ms="long long", behind_ms="long long", flow=FlowCounter)
    cdef bint _write(self, Reader reader, PullTarget target, Output output, int encoding,
                     int opaque) except -1
