"""Brokers, replication, elections, settings, NameServers."""

from typing import Any

from penstock.client.admin.async_admin import BrokerAddress, BrokerState, ReplicaStatus
from penstock.client.diagnosis.wording import similar_text
from penstock.console.api.overview_api import first_snapshot
from penstock.console.endpoints import ApiCall, ApiError, endpoint
from penstock.console.monitoring.lost_replicas import LostReplica, SeenReplica
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter, NoPermission, PenstockError
from penstock.version import VERSION

_ACCESS_CONTROL = ("authenticationEnabled", "authorizationEnabled", "aclEnable")
"""Without them, a broker refuses a change because of the setting, not because of the user."""


@endpoint("GET", "/cluster")
async def cluster(call: ApiCall) -> object:
    """All brokers with their role, version, rates, disk and replication; the NameServers.

    The `state` of a broker is `up`; `silent` if it is registered but does not answer; or `down` if
    it is not registered any more. The controllers tell which replicas a broker has. Without
    controllers, a broker is `down` for an hour and then left out. `seen_ms` is its last answer.
    """
    await first_snapshot(call)
    at = call.console.watch.snapshot
    replicas = {one.broker: one for one in at.replicas}
    lost = at.lost_replicas()
    return {
        "ready": call.console.watch.updated.is_set(),
        "at_ms": at.at_ms or None,
        "problem": at.problem or None,
        "nameservers": list(at.cluster.nameservers or call.console.admin.nameservers()),
        "clusters": sorted({*at.cluster.clusters, *(one.cluster for one in lost)}),
        "brokers": [
            *(
                _broker(state, replicas.get(state.broker), at.seen.get(state.broker.address))
                for state in at.cluster.brokers
            ),
            *(_lost(one) for one in lost),
        ],
    }


@endpoint("GET", "/cluster/elections")
async def elections(call: ApiCall) -> object:
    """The last elections by controllers, the newest first. Apache's controllers keep none."""
    await first_snapshot(call)
    histories = call.console.watch.snapshot.histories
    found = [one for history in histories for one in history.elections]
    addresses = {(h.broker, one.id): one.address for h in histories for one in h.replicas}
    return {
        "rows": [
            {
                "broker": one.broker,
                "epoch": one.epoch,
                "master_id": one.master_id,
                "master_address": addresses.get((one.broker, one.master_id)),
                "time_ms": one.time_ms,
                "reason": one.reason,
            }
            for one in sorted(found, key=lambda one: -one.time_ms)
        ],
        "problems": [
            {"broker": one.broker, "problem": one.problem.remark()}
            for one in histories
            if one.problem is not None
        ],
    }


@endpoint("GET", "/cluster/brokers/{broker}/{id}/settings")
async def settings(call: ApiCall) -> object:
    """The settings of a broker. `live` is whether a change takes effect at once; null if that is
    not known, as of Apache's brokers and of other releases."""
    broker, number = call.path("broker"), _id(call)
    found = await call.admin.broker_settings(broker, number)
    live = _live_settings(call, broker, number)
    return {
        "rows": [
            {"name": name, "value": value, "live": None if live is None else name in live}
            for name, value in sorted(found.items())
        ]
    }


@endpoint(
    "PUT",
    "/cluster/brokers/{broker}/{id}/settings",
    Role.ADMIN,
    body={"name": "name of the setting", "value": "new value"},
)
async def change_setting(call: ApiCall) -> object:
    """Change a setting of a running broker, and return its value afterwards.

    An unknown name or an invalid value is 400. 409 is a fixed setting, or a value that the broker
    has ignored, as Apache's brokers do with invalid ones.
    """
    broker, number = call.path("broker"), _id(call)
    name, value = call.given("name", str), call.given("value", str)
    before = await call.admin.broker_settings(broker, number)
    if name not in before:
        raise InvalidParameter(
            f"{broker} has no setting {name[:80]}{similar_text('settings', name, before)}",
            hint="see the settings of the broker",
        )
    try:
        await call.admin.update_broker_settings(broker, {name: value}, number)
    except NoPermission as error:
        live = _live_settings(call, broker, number)
        checked = any(before.get(one) == "true" for one in _ACCESS_CONTROL)
        if not checked or (live is not None and name not in live):
            raise ApiError(409, error.message) from None
        raise
    after = (await call.admin.broker_settings(broker, number)).get(name)
    ignored = after == before[name] and value.strip().casefold() != after.casefold()
    if ignored and _penstock_version(call, broker, number) is None:
        raise ApiError(
            409,
            f"the broker has ignored the value {value[:80]!r}: {name} is still {after}",
            "check the value; Apache's brokers ignore an invalid one without an error",
        )
    return {"name": name, "value": after}


@endpoint(
    "POST",
    "/cluster/brokers/{broker}/writes",
    Role.ADMIN,
    body={"allowed": "true or false"},
)
async def writes(call: ApiCall) -> object:
    """Remove the write permission of a broker from the routes, or restore it."""
    broker, allowed = call.path("broker"), call.given("allowed", bool)
    if allowed:
        await call.admin.allow_writes(broker)
    else:
        await call.admin.stop_writes(broker)
    return {"broker": broker, "allowed": allowed}


def _penstock_version(call: ApiCall, broker: str, number: int) -> str | None:
    """The release of a broker, if it is Penstock's."""
    for state in call.console.watch.snapshot.cluster.brokers:
        if (state.broker.name, state.broker.id) == (broker, number) and state.runtime_info:
            return state.runtime_info.penstock_version
    return None


def _live_settings(call: ApiCall, broker: str, number: int) -> frozenset[str] | None:
    """The settings that can change at run time; None if that is not known of this broker."""
    live = call.console.settings.live_settings
    return live if live and _penstock_version(call, broker, number) == VERSION else None


def _id(call: ApiCall) -> int:
    text = call.path("id")
    if not text.isdecimal():
        raise InvalidParameter(f"{text[:40]!r} is not a broker id")
    return int(text)


def _broker(
    state: BrokerState, replica: ReplicaStatus | None, seen: SeenReplica | None
) -> dict[str, Any]:
    broker, info = state.broker, state.runtime_info
    problem: PenstockError | None = state.problem or (replica.problem if replica else None)
    return {
        "cluster": broker.cluster,
        "name": broker.name,
        "id": broker.id,
        "address": broker.address,
        "is_master": broker.is_master,
        "state": "up" if state.problem is None else "silent",
        "seen_ms": seen.at_ms if seen else None,
        "role": replica.role if replica else None,
        "epoch": replica.epoch if replica else None,
        "log_end": replica.log_end if replica else None,
        "behind": replica.behind if replica else None,
        "in_sync": replica.in_sync if replica else None,
        "controllers": list(replica.controllers) if replica else [],
        "replication_error": (replica.error or None) if replica else None,
        "problem": problem.remark() if problem is not None else None,
        "version": info.version if info else None,
        "penstock_version": info.penstock_version if info else None,
        "started_ms": info.started_ms if info else None,
        "rate_in": info.put_tps if info else None,
        "rate_out": info.get_tps if info else None,
        "stored_today": info.put_today if info else None,
        "read_today": info.get_today if info else None,
        "disk_used": info.disk_used if info else None,
        "earliest_ms": info.earliest_ms if info else None,
        "log_bytes": info.log_end - info.log_begin
        if info and info.log_end is not None and info.log_begin is not None
        else None,
    }


def _lost(lost: LostReplica) -> dict[str, Any]:
    """A replica that is not registered: what the controllers say and what it said last."""
    seen = lost.seen
    address = BrokerAddress(lost.cluster, lost.name, lost.id or 0, lost.address)
    last = _broker(
        BrokerState(address, seen.state.runtime_info if seen else None),
        seen.status if seen else None,
        seen,
    )
    unknown = dict.fromkeys(("rate_in", "rate_out", "behind", "disk_used", "role"))
    problem = "it is not registered with the NameServers"
    if lost.is_alive is not None:
        heard = "still receive" if lost.is_alive else "receive no"
        problem += f", and the controllers {heard} heartbeats from it"
    return {
        **last,
        **unknown,
        "id": lost.id,
        "is_master": False,
        "state": "down",
        "in_sync": lost.in_sync,
        "replication_error": None,
        "problem": problem,
    }
