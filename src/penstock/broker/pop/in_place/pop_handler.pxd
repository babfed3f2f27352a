cimport cython
from penstock.broker.pop.checkpoints cimport PopCheckpoint, PopCheckpoints
from penstock.broker.pop.in_place.pop_batches cimport FoundBatch, PopBatches
from penstock.broker.pop.in_place.pop_targets cimport ResolvedPop, PopTargets, PopTopic
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.get cimport Reader
from penstock.store.put cimport StoreWriter
from penstock.wire.frame cimport Request
from penstock.wire.output cimport Output

cdef int _UNUSUAL
cdef int _WRITTEN
cdef int _FOUND
cdef int _MESSAGES_MAX
cdef long long _INVISIBLE_MS_MAX
cdef int _MODE_MIN
cdef int _SPARSE
cdef int _LATE_MS
cdef int _ONEWAY
cdef long long _INT_MAX
cdef long long _NO_LIMIT

cdef class SuspendedPop:
    cdef readonly PopHandler handler
    cdef readonly ResolvedPop target
    cdef readonly int count_max
    cdef readonly long long invisible_ms
    cdef readonly bint from_first
    cdef readonly object retry

    cpdef object wrap(self, object answer)
    cpdef int write(self, Output output, int encoding, int opaque) except -1

cdef class PopHandler:
    cdef object _context
    cdef object _role
    cdef object _pop
    cdef object _queues
    cdef object _polling
    cdef object _queues_in_read
    cdef object _revive_log
    cdef object _store
    cdef StoreWriter _writer
    cdef PopTargets _targets
    cdef PopCheckpoints _checkpoints
    cdef object _live
    cdef object _settings
    cdef long long _batches_max
    cdef long long _bytes_max
    cdef long long _in_flight_max
    cdef int _count_max
    cdef long long _invisible_ms
    cdef bint _from_first
    cdef PopBatches _found
    cdef long long _rest
    cdef int _revive_queue_id

    @cython.locals(target=ResolvedPop, suspended=SuspendedPop)
    cpdef object handle(self, Request request, Output output, long long client, long long now_ms)
    @cython.locals(target=ResolvedPop)
    cpdef int write_woken(self, SuspendedPop suspended, Output output, int encoding,
                          int opaque) except -1
    @cython.locals(pop_ms="long long")
    cdef int _answer(self, ResolvedPop target, Output output, int encoding, int opaque) except -1
    cdef ResolvedPop _usual_target(self, Request request, long long now_ms)
    @cython.locals(wait=int, born=int, count=int, invisible=int, mode=int, born_ms="long long",
                   count_max="long long", init_mode="long long")
    cdef bint _read_numbers(self, Request request, long long now_ms) except -1
    @cython.locals(first="long long", retries_first=bint)
    cdef bint _search(self, ResolvedPop target) except -1
    @cython.locals(number=int)
    cdef bint _search_retries(self, ResolvedPop target) except -1
    @cython.locals(made=dict, queue_id=int, count=int)
    cdef bint _search_topic(self, PopTopic topic, ResolvedPop target, long long first) except -1
    @cython.locals(high="long long", space="long long", reader=Reader, found=PopBatches,
                   count_max=int, status=int)
    cdef bint _look_at(self, PopTopic topic, ResolvedPop target, ConsumeQueue queue,
                       long long offset) except -1
    cdef bint _is_over_limit(self, str topic, str group, int queue_id) except -1
    @cython.locals(given=int, number=int, batch=FoundBatch, checkpoint=PopCheckpoint,
                   pop_ms="long long", behind_ms="long long")
    cdef long long _deliver(self, ResolvedPop target, long long now_ms) except -1
    @cython.locals(number=int, batch=FoundBatch)
    cdef long long _unused_pop_ms(self, ResolvedPop target, long long now_ms) except -1
