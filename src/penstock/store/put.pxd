cimport cython
from penstock.store.commitlog cimport CommitLog
from penstock.store.consumequeue.queue_table cimport QueueTable
from penstock.store.segment cimport SegmentList
from penstock.store.consumequeue.consumequeue cimport ConsumeQueue
from penstock.store.flusher cimport Flusher
from penstock.store.index cimport Index, IndexFile
from penstock.wire cimport layout
from penstock.wire.record cimport BatchWalk, PropertyMarks, Record, StoredRecord

cdef int _PUT_OK
cdef int _ILLEGAL
cdef int _NO_QUEUE
cdef int _REFUSED
cdef int _REPLAYED_MAX
cdef int _TRANSACTION_MASK
cdef int _PREPARED
cdef int _ROLLBACK
cdef int _SPACE
cdef int _SIZE_BUCKETS
cdef int _SPECIAL_PRIORITY

cdef class StoreWriter:
    cdef readonly CommitLog log
    cdef readonly Flusher flusher
    cdef public long long confirm_offset
    cdef readonly QueueTable queues
    cdef readonly Index index
    cdef public bint index_tags
    cdef public object refusal
    cdef readonly object fault
    cdef readonly int problem
    cdef readonly long long offset
    cdef readonly long long queue_offset
    cdef readonly long long last_offset
    cdef public long long gaps
    cdef public long long unplaced
    cdef public object damage
    cdef public long long confirm_limit
    cdef public bint replicated
    cdef public long long replicated_to
    cdef public long long store_ms
    cdef public long long plausible_to_ms
    cdef readonly long long puts
    cdef readonly long long put_bytes
    cdef readonly long long failed_puts
    cdef readonly long long[::1] size_counts
    cdef long long[::1] _size_bounds
    cdef public list dirty
    cdef public list arrived
    cdef public list to_preallocate
    cdef list _replayed
    cdef long long _replayed_count
    cdef dict _unconfirmed
    cdef dict _jumped
    cdef BatchWalk _batch
    cdef readonly long long[::1] batch_offsets
    cdef readonly Py_ssize_t batch_count
    cdef long long _batch_messages
    cdef long long _batch_keys
    cdef long long _flusher_told

    @cython.locals(queue=ConsumeQueue, status=int)
    cpdef int put(self, Record record, long long now_ms) except -1
    @cython.locals(problem=int)
    cpdef int check(self, Record record) except -1
    cpdef int put_in(self, Record record, ConsumeQueue queue, long long now_ms) except -1
    @cython.locals(queue=ConsumeQueue, body_at="Py_ssize_t", body_length="Py_ssize_t",
                   total="long long", first_queue_offset="long long", status=int,
                   count="Py_ssize_t")
    cpdef int put_batch(self, Record record, long long now_ms) except -1
    @cython.locals(log=CommitLog)
    cpdef bint publish(self) except -1
    @cython.locals(body_at="Py_ssize_t", body_length="Py_ssize_t", total="long long", more=int,
                   problem=int)
    cdef long long _measure(self, Record record) except -2
    @cython.locals(transaction=int, queued=bint, queue_offset="long long", offset="long long")
    cdef int _append(self, Record record, ConsumeQueue queue) except -1
    cdef int _add_entry(self, ConsumeQueue queue, long long offset, int size,
                        long long tags_code) except -1
    @cython.locals(bucket="Py_ssize_t")
    cdef int _count(self, ConsumeQueue queue, int size) except -1
    @cython.locals(queue=ConsumeQueue, transaction=int, queued=bint)
    cpdef int dispatch(self, StoredRecord stored) except -1
    @cython.locals(before="long long", gap="long long")
    cdef bint _continue_at(self, ConsumeQueue queue, long long offset) except -1
    cdef int _write_failed(self, object error) except -1
    cdef int _fail(self, object error) except -1
    cdef int _refuse(self) except -1
    cdef int _refused(self, object fault) except -1
    cdef int _illegal(self, int problem) except -1
    @cython.locals(current=IndexFile)
    cdef int _index_ready(self, Index index) except -1
    @cython.locals(at="Py_ssize_t", end="Py_ssize_t", start="Py_ssize_t", seed=int)
    cdef int _put_keys(self, PropertyMarks marks, ConsumeQueue queue, long long offset) except -1
    @cython.locals(key_hash=int)
    cdef int _put_key(self, PropertyMarks marks, Py_ssize_t at, Py_ssize_t length, int seed,
                      long long offset) except -1
    @cython.locals(queue=ConsumeQueue, transaction=int, code="long long")
    cpdef int replay(self, StoredRecord stored) except -1
    cpdef int note_store_ms(self, long long store_ms) except -1
    cdef long long _plausible_ms(self, long long store_ms) noexcept
