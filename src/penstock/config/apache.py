"""Convert settings from and to the names and formats of RocketMQ's configuration files."""

import json
import math
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from penstock.config.settings import (
    ROLE_TABLES,
    Role,
    Settings,
    all_settings,
    ha_port,
    value_of,
    write_value,
)

QUEUE_ENTRY_BYTES = 20
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"

_PROTECTED = """
brokerConfigPath brokerConfigPaths rocketmqHome configBlackList configStorePath kvConfigPath
storePathRootDir storePathCommitLog storePathDLedgerCommitLog storePathEpochFile
storePathBrokerIdentity readOnlyCommitLogStorePaths authConfigPath messageStorePlugIn
authenticationProvider authenticationMetadataProvider authenticationStrategy
authorizationProvider authorizationMetadataProvider authorizationStrategy
"""
PROTECTED = frozenset(_PROTECTED.split())
"""Settings that are paths or classes. They can't be changed over the network, as in RocketMQ."""

_DEFAULT_STORE = "~/store"

_RATE = "maxHaTransferByteInSecond"
_RATE_ENABLED = "haFlowControlEnable"
_RATE_DEFAULT = 100 * 1024 * 1024
_CONTROLLERS = "controllerAddr"
_CONTROLLER_MODE = "enableControllerMode"

_PROVIDERS = (
    "authenticationProvider",
    "authenticationMetadataProvider",
    "authorizationProvider",
    "authorizationMetadataProvider",
)
_APACHE_PROVIDERS = "org.apache.rocketmq.auth."
_NO_PROVIDERS = (
    "Java classes can't be loaded; users and access lists are kept by the broker (mqadmin "
    "createUser, mqadmin createAcl)"
)
_OPENSSL = "the configuration of the system's OpenSSL decides; set it there"
_REFUSED_IF_SET = {
    "messageStorePlugIn": "Java classes can't be loaded, and there is no tiered storage",
    "tls.ciphers": _OPENSSL,
    "tls.protocols": _OPENSSL,
}
_NO_DLEDGER = (
    "the log of DLedger is not supported, and RocketMQ has deprecated it; use "
    "enableControllerMode=true and controllerAddr, with which controllers elect the master"
)
_NO_CONTROLLERS = "set controllerAddr to the controllers, as host:port;host:port"
_NO_ACTING_MASTER = (
    "a slave never acts as a master; remove this setting, and set slaveReadEnable=true on the "
    "master and its slaves so that consumers continue while the master is down"
)
_NO_ROCKSDB = (
    "timers and half messages are kept in files, not in RocksDB; for an existing store follow "
    "docs/migration.md, then remove this setting"
)
_NO_LIGHT_QUEUES = "light message queues are not supported: their consumers would get nothing"
_REFUSED_VALUES = {
    ("aclEnable", "true"): "this is the access control of RocketMQ 4; use authenticationEnabled "
    "and authorizationEnabled, and create the users with mqadmin createUser",
    ("enableDLegerCommitLog", "true"): _NO_DLEDGER,
    ("enableSlaveActingMaster", "true"): _NO_ACTING_MASTER,
    ("timerRocksDBEnable", "true"): _NO_ROCKSDB,
    ("transRocksDBEnable", "true"): _NO_ROCKSDB,
    ("enableLmq", "true"): _NO_LIGHT_QUEUES,
    ("enableMultiDispatch", "true"): _NO_LIGHT_QUEUES,
    ("cleanFileForciblyEnable", "false"): "set diskSpaceCleanForciblyRatio=100 instead: segments "
    "that have not expired are then kept, and writes are refused when the disk is full",
}


class Form(NamedTuple):
    """The format of a value in RocketMQ's files, where it differs from ours.

    `read` raises ValueError with the violated rule ("must be …").
    """

    read: Callable[[str], str]
    write: Callable[[str], str]


def _read_flush(text: str) -> str:
    if text not in ("SYNC_FLUSH", "ASYNC_FLUSH"):
        raise ValueError("must be SYNC_FLUSH or ASYNC_FLUSH")
    return "true" if text == "SYNC_FLUSH" else "false"


def _read_role(text: str) -> str:
    if text not in ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE"):
        raise ValueError("must be ASYNC_MASTER, SYNC_MASTER or SLAVE")
    return text.lower()


def _read_ha_port(text: str) -> str:
    return "-1" if text in ("", "0") or text.startswith("-") else text


def _invert(text: str) -> str:
    return {"true": "false", "false": "true"}.get(text.lower(), text)


def _read_seconds(text: str) -> str:
    if not text.isdecimal():
        raise ValueError("must be a whole number of seconds")
    return str(int(text) * 1000)


def _read_queue_bytes(text: str) -> str:
    if not text.isdecimal():
        raise ValueError("must be a whole number of bytes")
    return str(math.ceil(int(text) / QUEUE_ENTRY_BYTES))


def _read_pair(user: str, password: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        try:
            pair = json.loads(text) if text else None
        except ValueError:
            pair = {}
        if pair is None:
            return ""
        if not isinstance(pair, dict) or not (pair.get(user) and pair.get(password)):
            raise ValueError(f'must be {{"{user}":"…","{password}":"…"}}')
        return f"{pair[user]}:{pair[password]}"

    return read


def _write_pair(user: str, password: str) -> Callable[[str], str]:
    def write(text: str) -> str:
        return json.dumps(dict(zip((user, password), text.split(":", 1), strict=False)))

    return write


_FORMS = {
    "flushDiskType": Form(_read_flush, {"true": "SYNC_FLUSH", "false": "ASYNC_FLUSH"}.__getitem__),
    "brokerRole": Form(_read_role, str.upper),
    "haListenPort": Form(_read_ha_port, str),
    "syncFromLastFile": Form(_invert, _invert),
    "mappedFileSizeConsumeQueue": Form(
        _read_queue_bytes, lambda entries: str(int(entries) * QUEUE_ENTRY_BYTES)
    ),
    "serverChannelMaxIdleTimeSeconds": Form(
        _read_seconds, lambda ms: str(math.ceil(int(ms) / 1000))
    ),
    "tls.server.mode": Form(
        lambda mode: "off" if mode == "disabled" else mode,
        lambda mode: "disabled" if mode == "off" else mode,
    ),
    "kvConfigPath": Form(
        os.path.dirname, lambda data: data and os.path.join(data, "kvConfig.json")
    ),
    "initAuthenticationUser": Form(
        _read_pair("username", "password"), _write_pair("username", "password")
    ),
    "innerClientAuthenticationCredentials": Form(
        _read_pair("accessKey", "secretKey"), _write_pair("accessKey", "secretKey")
    ),
}
_PROMISES = (
    "flushDiskType", "brokerRole", "inSyncReplicas", "minInSyncReplicas", "allAckInSyncStateSet",
    "authenticationEnabled", "authorizationEnabled", "aclEnable", "tls.server.mode",
    "store.sync_flush", "replication.role", "replication.in_sync_replicas",
    "replication.min_in_sync_replicas", "replication.all_in_sync_acknowledge",
    "access.authentication", "access.authorization", "tls.mode",
)  # fmt: skip
_MISSPELT = 0.85
"""How similar an unknown name is to the one that was meant (difflib's ratio)."""
_PLAIN = Form(lambda text: text, lambda text: text)
_ALIASES = {"tlsMode": "tls.server.mode"}


@cache
def names_by_apache(role: Role) -> dict[str, str]:
    """RocketMQ's name → ours (`table.field`), for a broker or a NameServer."""
    return {
        setting.doc.apache: name
        for name, setting in all_settings().items()
        if setting.doc.apache and name.partition(".")[0] in ROLE_TABLES[role]
    }


def find_setting(key: str, role: Role) -> tuple[str, Form] | None:
    """The full name of the setting with RocketMQ's or our name, and the format of its value."""
    key = _ALIASES.get(key, key)
    name = names_by_apache(role).get(key)
    if name is not None:
        return name, _FORMS.get(key, _PLAIN)
    return (key, _PLAIN) if key in all_settings() else None


def unsupported_reason(key: str, value: str, values: Mapping[str, str]) -> str:
    """Why a setting of RocketMQ must be refused; empty if it may be ignored.

    Ignoring one of these would disable access control, hide stored data or break a guarantee.
    """
    if key in _PROVIDERS:
        return "" if not value or value.startswith(_APACHE_PROVIDERS) else _NO_PROVIDERS
    if key in _REFUSED_IF_SET:
        return _REFUSED_IF_SET[key] if value else ""
    if key == "storeType" and value not in ("", "default"):
        return "the only store type is default"
    if key == "storePathCommitLog":
        root = values.get("storePathRootDir", "").strip() or _DEFAULT_STORE
        if not _same_path(value, os.path.join(root, "commitlog")):
            return f"the CommitLog must be in {os.path.join(root, 'commitlog')}; move or link it"
    if key == _CONTROLLER_MODE and value.lower() == "true" and not values.get(_CONTROLLERS):
        return _NO_CONTROLLERS
    return _REFUSED_VALUES.get((key, value.lower()), "")


def resembles_promise(key: str) -> bool:
    """Whether an unknown key is probably a misspelt setting that changes what a broker promises."""
    known = {name.lower() for name in _PROMISES}
    return bool(get_close_matches(key.lower(), known, 1, _MISSPELT))


def defaults(role: Role) -> dict[str, str]:
    """RocketMQ's defaults that differ from ours; they apply to a file with RocketMQ's names."""
    if role != "broker":
        return {f"{role}.host": "0.0.0.0"}
    return {
        "broker.host": "0.0.0.0",
        "broker.name": os.uname().nodename,
        "broker.data": os.path.expanduser(_DEFAULT_STORE),
        "replication.protocol": "static",
    }


def join_rate_limit(values: Mapping[str, str], rate_before: int = 0) -> Mapping[str, str]:
    """The values with the two settings that limit the rate of replication in RocketMQ as one.

    RocketMQ has a rate, and a switch that is off by default. Here a rate of 0 means no limit.
    """
    if _RATE not in values and _RATE_ENABLED not in values:
        return values
    enabled = values.get(_RATE_ENABLED, "true" if rate_before else "false")
    rate = values.get(_RATE, str(rate_before or _RATE_DEFAULT))
    joined = {key: value for key, value in values.items() if key != _RATE_ENABLED}
    return joined | {_RATE: rate if enabled.strip().lower() == "true" else "0"}


def join_controllers(values: Mapping[str, str]) -> Mapping[str, str]:
    """The values without the addresses of controllers unless the mode that uses them is on.

    With addresses, the mode is in effect: it must not be reported as ignored.
    """
    if values.get(_CONTROLLER_MODE, "").strip().lower() == "true":
        kept = dict(values)
        if kept.get(_CONTROLLERS):
            del kept[_CONTROLLER_MODE]
        return {"replication.protocol": "epochs"} | kept
    return {key: value for key, value in values.items() if key != _CONTROLLERS}


def apache_values(settings: Settings, role: Role) -> dict[str, str]:
    """All settings except secrets, under RocketMQ's names or, where it has none, ours."""
    by_name = {name: key for key, name in names_by_apache(role).items()}
    values = {}
    for name, setting in all_settings().items():
        if name.partition(".")[0] in ROLE_TABLES[role] and not setting.doc.secret:
            key = by_name.get(name, name)
            values[key] = _FORMS.get(key, _PLAIN).write(write_value(value_of(settings, name)))
    return values | (_broker_extras(settings) if role == "broker" else {})


def _broker_extras(settings: Settings) -> dict[str, str]:
    """Values that RocketMQ's tools read and that are not settings of Penstock."""
    broker, replication = settings.broker, settings.replication
    address = broker.announce or broker.host
    return {
        "brokerIP1": address,
        "brokerIP2": replication.announce or address,
        "haListenPort": str(ha_port(settings)),
        "inSyncReplicas": str(replication.copies_required()),
        "minInSyncReplicas": str(replication.in_sync_least()),
        _CONTROLLER_MODE: str(bool(replication.controllers)).lower(),
        _RATE: str(replication.rate_bytes_max or _RATE_DEFAULT),
        _RATE_ENABLED: "true" if replication.rate_bytes_max else "false",
        "storePathCommitLog": os.path.join(broker.data, "commitlog"),
        "msgTraceTopicName": TRACE_TOPIC,
        "maxTransferBytesOnMessageInDisk": str(broker.pull_bytes_max),
        "maxTransferCountOnMessageInDisk": str(broker.pull_messages_max),
        "rejectTransactionMessage": "false",
        "aclEnable": "false",
        "storeType": "default",
        "filterServerNums": "0",
        "popCkStayBufferTimeOut": "3000",  # tests wait this long; checkpoints are not delayed here
    }


def _same_path(one: str, other: str) -> bool:
    return os.path.abspath(os.path.expanduser(one)) == os.path.abspath(os.path.expanduser(other))
