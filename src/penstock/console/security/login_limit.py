"""Limits failed logins, by address and by user name."""

FREE_FAILURES = 5
"""Failures without a delay."""
DELAY_MS = 2_000
DELAY_MS_MAX = 300_000
FORGET_MS = 900_000
KEYS_MAX = 10_000


class LoginLimit:
    """After five failures each further one doubles the time until the next attempt."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, int]] = {}
        """Key → number of failures, time of the last one."""

    def wait_ms(self, keys: tuple[str, ...], now_ms: int) -> int:
        """How long the next attempt must wait; 0 if it need not."""
        return max(self._wait_ms(key, now_ms) for key in keys)

    def failed(self, keys: tuple[str, ...], now_ms: int) -> None:
        """Count a failure."""
        for key in keys:
            count, last_ms = self._failures.pop(key, (0, now_ms))
            if now_ms - last_ms > FORGET_MS:
                count = 0
            self._failures[key] = (count + 1, now_ms)
        while len(self._failures) > KEYS_MAX:
            self._failures.pop(next(iter(self._failures)))

    def succeeded(self, keys: tuple[str, ...]) -> None:
        """Forget the failures."""
        for key in keys:
            self._failures.pop(key, None)

    def _wait_ms(self, key: str, now_ms: int) -> int:
        count, last_ms = self._failures.get(key, (0, 0))
        if count < FREE_FAILURES or now_ms - last_ms > FORGET_MS:
            return 0
        delay_ms = min(DELAY_MS << min(count - FREE_FAILURES, 20), DELAY_MS_MAX)
        return max(last_ms + delay_ms - now_ms, 0)
