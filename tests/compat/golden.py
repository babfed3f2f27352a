"""Loads the golden fixtures, and asks the real decoders to read bytes of ours.

``load(version)`` returns the document of one RocketMQ version ("5.5.1", "5.4.0" or "4.9.8"). Bytes
are hex strings, everywhere. Every case has a unique ``name`` within its section; ``cases`` gives a
section by name. A section holds inputs (set by golden_inputs.py) and outputs (made by RocketMQ):

``rocketmq``, ``version_number``
    The release, and what it puts into the header field ``version``: 515, 493 and 409.

``frames``: commands as NettyEncoder writes them
    Inputs: ``code flag opaque version language(name) remark(or null) ext(or null) body(or null)``;
    if ``header_class`` is not null the ext fields come from that custom header with the fields
    ``header`` (values typed as in Java) and ``ext`` is null.
    Outputs: ``json`` and ``rocketmq``, the whole frame with its length field in either
    serialization; ``json_ext`` and ``rocketmq_ext``, the ext fields Java itself reads back from
    them (null = none). They differ where the binary form cannot tell: "" and {} become null or
    vanish. In binary, ``large-code`` is truncated to 16 bits (a fault of RocketMQ's).

``records``: MessageDecoder.encode, version 1 records
    Inputs: ``topic queue_id flag queue_offset physical_offset sys_flag born_timestamp born_host
    born_port store_timestamp store_host store_port reconsume_times prepared_transaction_offset
    body properties(object)``. ``body`` is what the application sent; where sys_flag has 0x1 the
    encoder compressed it. Hosts are written out in full (no ``::``), as Java prints them.
    Outputs: ``hex``, ``stored_body``, ``body_crc`` (of the stored body), ``msg_id``.

``store_records`` (empty in 4.9.8): MessageExtEncoder, the commit log's own encoder
    As ``records``, plus the input ``record_version`` (1 or 2: magic and width of the topic
    length); the body is stored as given.

``properties_to_text``: ``properties`` (object, values may be null) -> ``text``
``text_to_properties``: ``text`` (may be null) -> ``properties``
    5.x ends every property with 0x02; 4.9.8 writes 0x02 only between properties.

``batches``: ``messages`` (each ``flag body properties``) -> ``hex``

``offset_ids``: ``host port offset`` <-> ``id``

``unique_ids``: samples of MessageClientIDSetter.createUniqID, from the clock of the machine
    ``id``, ``created_ms`` (clock just before), and what Java reads from it: ``ip pid
    near_time_ms``. Made with time zone UTC: the time inside counts from the first of the month.
``unique_id_reads``: ``id`` -> ``ip pid``

``string_hashes``: ``text`` -> ``hash`` (signed, String.hashCode)
``crcs``: ``body`` -> ``crc32`` (UtilAll.crc32: 31 bits)
``index_hashes`` (empty in 4.9.8): ``key`` -> ``hash`` (IndexFile, never negative)
``index_files`` (empty in 4.9.8): a real IndexFile
    Inputs: ``hash_slots max_entries puts`` (each ``key physical_offset store_timestamp``).
    Outputs: ``accepted`` in each put (false once full), ``hex`` of the whole file.

``compressed``: ``codec`` ("LZ4", "ZSTD", "ZLIB"), ``level``, ``body`` -> ``hex``

``bodies``: protocol objects written as JSON by RemotingSerializable
    Inputs: ``class`` (simple name), ``fields``. A map keyed by objects (MessageQueue) is a list of
    [key, value] pairs in ``fields`` and ``object``; one keyed by numbers has string keys there;
    a set is a list, in ``object`` sorted by the JSON text of its members.
    Outputs: ``object``, every field the Java object had, nested and with defaults (fields that
    the release does not know are missing); ``text``, as on the wire; ``pretty``, the form of the
    config files; with ``strict``: ``strict_text``, as the name server answers to clients that
    want standard JSON; with ``compress``: ``compressed``, RegisterBrokerBody's own format.
    Cases whose class the release does not have are missing.

The text of the bodies is not always JSON (unquoted number keys, object keys).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from . import maven
from .java_session import JavaSession

Case = dict[str, Any]

VERSIONS = maven.VERSIONS


def path(version: str) -> Path:
    """Where the fixture of a RocketMQ version lives."""
    return Path(__file__).parents[1] / "fixtures" / "golden" / f"{version}.json"


@functools.cache
def load(version: str) -> dict[str, Any]:
    """The golden document of a RocketMQ version; shared, so not to be changed."""
    document: dict[str, Any] = json.loads(path(version).read_text(encoding="ascii"))
    return document


def cases(version: str, section: str) -> dict[str, Case]:
    """The cases of one section by name."""
    return {case["name"]: case for case in load(version)[section]}


def verify(java: JavaSession, document: dict[str, list[Case]]) -> dict[str, dict[str, Case]]:
    """Let the decoders of the session's release read bytes of ours.

    `document` has any of these sections, each a list of cases with a ``name``:

    - ``frames``: ``hex`` of a frame with its length field. Seen: an object ``code flag opaque
      version language remark ext body serialize_type``.
    - ``records``: ``hex`` of one or more concatenated records. Seen: a list of objects with the
      fields of a golden record (``body`` decompressed) and ``store_size``.
    - ``batches``: ``hex``. Seen: a list of ``flag body properties``.
    - ``properties``: ``text``. Seen: an object.
    - ``compressed``: ``codec hex``. Seen: hex of the decompressed body.
    - ``bodies``: ``class hex`` (of the JSON text). Seen: like ``object`` of a golden body.
    - ``register_bodies``: ``hex is_compressed version`` (the broker's version number). Seen: same.

    Returns for every section the results by name: ``{"name", "seen"}``, or ``{"name", "error"}``
    with the Java exception where the decoder refused.
    """
    results: dict[str, list[Case]] = java.do("golden.verify", document=document)
    return {
        section: {result["name"]: result for result in found} for section, found in results.items()
    }
