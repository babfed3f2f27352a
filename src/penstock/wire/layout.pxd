# The C side of layout.py, which says what each name means; tests/unit/wire/test_layout.py compares.
# This file is compiled into every module that cimports it, never on its own.

cdef enum:
    SIZE_AT = 0
    MAGIC_AT = 4
    BODY_CRC_AT = 8
    QUEUE_ID_AT = 12
    FLAG_AT = 16
    QUEUE_OFFSET_AT = 20
    PHYSICAL_OFFSET_AT = 28
    SYS_FLAG_AT = 36
    BORN_MS_AT = 40
    BORN_HOST_AT = 48
    RECONSUME_TIMES_BEFORE_BODY = 16
    PREPARED_OFFSET_BEFORE_BODY = 12
    BODY_LENGTH_BEFORE_BODY = 4
    HEAD_BYTES = 8
    FIXED_BYTES = 91
    PROPERTIES_LENGTH_BYTES = 2
    MAGIC_V1 = -626843481
    MAGIC_V2 = -626843477
    MAGIC_BLANK = -875286124
    BLANK_BYTES = 8
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    HOST_V4_BYTES = 8
    HOST_V6_BYTES = 20
    BATCH_FLAG_AT = 12
    BATCH_BODY_LENGTH_AT = 16
    BATCH_BODY_AT = 20
    BATCH_FIXED_BYTES = 22
    ENTRY_OFFSET_AT = 0
    ENTRY_SIZE_AT = 8
    ENTRY_TAG_AT = 12
    ENTRY_BYTES = 20
    INDEX_BEGIN_MS_AT = 0
    INDEX_END_MS_AT = 8
    INDEX_BEGIN_OFFSET_AT = 16
    INDEX_END_OFFSET_AT = 24
    INDEX_SLOTS_USED_AT = 32
    INDEX_NEXT_NUMBER_AT = 36
    INDEX_HEADER_BYTES = 40
    INDEX_SLOT_BYTES = 4
    INDEX_KEY_HASH_AT = 0
    INDEX_OFFSET_AT = 4
    INDEX_SECONDS_AT = 12
    INDEX_PREVIOUS_AT = 16
    INDEX_ENTRY_BYTES = 20


cdef inline int born_host_length(int sys_flag) noexcept nogil:
    return HOST_V6_BYTES if sys_flag & BORN_HOST_V6 else HOST_V4_BYTES

cdef inline int store_host_length(int sys_flag) noexcept nogil:
    return HOST_V6_BYTES if sys_flag & STORE_HOST_V6 else HOST_V4_BYTES

cdef inline int store_ms_at(int sys_flag) noexcept nogil:
    return BORN_HOST_AT + born_host_length(sys_flag)

cdef inline int store_host_at(int sys_flag) noexcept nogil:
    return store_ms_at(sys_flag) + 8

cdef inline int body_at(int sys_flag) noexcept nogil:
    return store_host_at(sys_flag) + store_host_length(sys_flag) + RECONSUME_TIMES_BEFORE_BODY

cdef inline int topic_length_bytes(int magic) noexcept nogil:
    return 2 if magic == MAGIC_V2 else 1
