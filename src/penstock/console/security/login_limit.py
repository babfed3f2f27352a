"""Limits failed logins: those of one user from one address, and all of one address.

Failures from one address never delay another one, so a stranger elsewhere can't lock a user out.
"""

import ipaddress

FREE_FAILURES = 5
"""Failures of one user from one address without a delay."""
FREE_FAILURES_OF_ADDRESS = 20
"""Failures of one address, with any names, without a delay. Several users may share an address."""
DELAY_MS = 2_000
DELAY_MS_MAX = 300_000
FORGET_MS = 900_000
KEYS_MAX = 10_000
_IPV6_PREFIX = 64
"""Whoever has one IPv6 address usually has all addresses with the same 64 bits."""

Key = tuple[str, str | None]


class LoginLimit:
    """After some failures each further one doubles the time until the next attempt."""

    def __init__(self) -> None:
        self._failures: dict[Key, tuple[int, int]] = {}
        """(address, user) and (address, None) → number of failures, time of the last one."""

    def wait_ms(self, address: str, user: str, now_ms: int) -> int:
        """How long the next attempt must wait; 0 if it need not."""
        of_user, of_address = _keys(address, user)
        return max(
            self._wait_ms(of_user, FREE_FAILURES, now_ms),
            self._wait_ms(of_address, FREE_FAILURES_OF_ADDRESS, now_ms),
        )

    def failed(self, address: str, user: str, now_ms: int) -> None:
        """Count a failure."""
        for key in _keys(address, user):
            count, last_ms = self._failures.pop(key, (0, now_ms))
            if now_ms - last_ms > FORGET_MS:
                count = 0
            self._failures[key] = (count + 1, now_ms)
        while len(self._failures) > KEYS_MAX:
            self._failures.pop(next(iter(self._failures)))

    def succeeded(self, address: str, user: str) -> None:
        """An attempt that was counted as a failure has succeeded: forget the user's failures.

        The address keeps the failures with other names: whoever has an account must not be able
        to guess the passwords of others between two logins.
        """
        of_user, of_address = _keys(address, user)
        own, _ = self._failures.pop(of_user, (0, 0))
        count, last_ms = self._failures.pop(of_address, (0, 0))
        if count > own:
            self._failures[of_address] = (count - own, last_ms)

    def _wait_ms(self, key: Key, free: int, now_ms: int) -> int:
        count, last_ms = self._failures.get(key, (0, 0))
        if count < free or now_ms - last_ms > FORGET_MS:
            return 0
        delay_ms = min(DELAY_MS << min(count - free, 20), DELAY_MS_MAX)
        return max(last_ms + delay_ms - now_ms, 0)


def _keys(address: str, user: str) -> tuple[Key, Key]:
    """The key of a user at an address, and of the address."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:  # a proxy may forward a name
        network = address
    else:
        if known.version == 6 and known.ipv4_mapped is not None:
            known = known.ipv4_mapped
        bits = _IPV6_PREFIX if known.version == 6 else known.max_prefixlen
        network = str(ipaddress.ip_network((known, bits), strict=False))
    return (network, user), (network, None)
