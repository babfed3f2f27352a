"""A model of etcd in memory, with the interface of `EtcdClient` and faults on command."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.errors import EtcdError, EtcdRefused
from penstock.server.controller.etcd.etcd_messages import decode

T = TypeVar("T")

Key = dict[str, Any]


class EtcdModel:
    """Keys with revisions and leases; time passes only by `expire`."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[bytes, Key] = {}
        self.leases: set[int] = set()
        self.calls: list[str] = []
        self.repeat: list[Callable[[str], bool]] = []
        """If one of these says so for a path, the request is executed twice, as when an answer is
        lost. It is removed then."""
        self.before: list[Callable[[], None]] = []
        """Called before the next requests, one each."""
        self.down = False

    async def call(self, path: str, message: Any, kind: type[T]) -> T:
        return await self.exchange(
            path, msgspec.json.encode(message), lambda body: decode(body, kind)
        )

    async def exchange(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        await asyncio.sleep(0)
        self.calls.append(path)
        if self.down:
            raise EtcdError("down")
        if self.before:
            self.before.pop(0)()
        answer = self._execute(path, body)
        for fault in self.repeat:
            if fault(path):
                self.repeat.remove(fault)
                answer = self._execute(path, body)
                break
        return read(answer)

    def lose_answer(self, path: str) -> None:
        """Lose the answer to the next request with this path; the client sends it again."""
        self.repeat.append(lambda called: called == path)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Another client writes a key; the revision."""
        self.revision += 1
        self._put(key, value, lease)
        return self.revision

    def delete(self, key: bytes) -> None:
        self.revision += 1
        self.keys.pop(key, None)

    def expire(self, lease: int) -> None:
        """A lease is over."""
        self.leases.discard(lease)
        for key in [key for key, found in self.keys.items() if int(found["lease"]) == lease]:
            self.delete(key)

    # --- requests

    def _execute(self, path: str, body: bytes) -> bytes:
        if path == "/v3/lease/keepalive":
            return json.dumps(self._keep_alive(int(json.loads(body)["ID"]))).encode()
        message = json.loads(body)
        answer: Any
        if path == "/v3/kv/range":
            answer = self._range(message)
        elif path == "/v3/kv/txn":
            before = self.revision
            self.revision += 1
            answer, changed = self._txn(message)
            if not changed:
                self.revision = before
        elif path == "/v3/kv/put":
            self.put(_bytes(message["key"]), _bytes(message["value"]), int(message["lease"]))
            answer = {}
        elif path == "/v3/lease/grant":
            self._grant(int(message["ID"]))
            answer = {"ID": message["ID"], "TTL": message["TTL"]}
        elif path == "/v3/lease/revoke":
            self.expire(int(message["ID"]))
            answer = {}
        else:
            raise AssertionError(path)
        answer["header"] = {"revision": str(self.revision)}
        return json.dumps(answer).encode()

    def _grant(self, lease: int) -> None:
        if lease in self.leases:
            raise EtcdRefused("lease already exists", grpc_code=9)
        self.leases.add(lease)

    def _keep_alive(self, lease: int) -> dict[str, Any]:
        return {"result": {"ID": str(lease), "TTL": "2" if lease in self.leases else "0"}}

    def _range(self, message: Any) -> dict[str, Any]:
        low = _bytes(message["key"])
        high = _bytes(message["range_end"]) if "range_end" in message else low + b"\0"
        found = [self.keys[key] for key in sorted(self.keys) if low <= key < high]
        limit = int(message.get("limit", 0)) or len(found)
        return {"kvs": found[:limit], "more": len(found) > limit}

    def _txn(self, message: Any) -> tuple[dict[str, Any], bool]:
        succeeded = all(map(self._holds, message.get("compare", ())))
        changed = False
        responses = []
        for part in message.get("success" if succeeded else "failure", ()):
            ((kind, request),) = part.items()
            if kind == "request_range":
                responses.append({"response_range": self._range(request)})
            elif kind == "request_put":
                changed = True
                self._put(_bytes(request["key"]), _bytes(request["value"]), int(request["lease"]))
                responses.append({"response_put": {}})
            else:
                for kv in self._range(request)["kvs"]:
                    changed = True
                    del self.keys[_bytes(kv["key"])]
                responses.append({"response_delete_range": {}})
        return {"succeeded": succeeded, "responses": responses}, changed

    def _holds(self, condition: Any) -> bool:
        wanted = int(condition["mod_revision"])
        found = [int(kv["mod_revision"]) for kv in self._range(condition)["kvs"]] or [0]
        if condition["result"] == "LESS":
            return all(revision < wanted for revision in found)
        return found == [wanted]

    def _put(self, key: bytes, value: bytes, lease: int) -> None:
        if lease and lease not in self.leases:
            raise EtcdRefused("requested lease not found", grpc_code=5)
        created = self.keys.get(key, {}).get("create_revision", str(self.revision))
        self.keys[key] = {
            "key": base64.b64encode(key).decode(),
            "value": base64.b64encode(value).decode(),
            "create_revision": created,
            "mod_revision": str(self.revision),
            "lease": str(lease),
        }


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
