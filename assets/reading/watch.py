"""A background thread that keeps an open dataset at the version that is served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Self

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.times import utc_now

_log = logging.getLogger("adjunct.serving")
_LONGEST_STOP = 10.0


class Watch:
    """Calls what `refresh()` gives every `interval` seconds, once started until stopped; a `with` does both.

    `Dataset.watch` gives one that is started. Where `refresh()` gives None the reader is gone, and the watch ends.

    A refresh that fails leaves the reader at its version and is tried again: `error` holds what it raised until one
    succeeds, `failing_since` when that began, and the log says so once. Whatever is not an AdjunctError ends the
    watch: `running` is False then.
    """

    def __init__(self, name: str, refresh: Callable[[], Callable[[], object] | None], interval: float) -> None:
        if not interval > 0:
            raise ConfigurationError(
                f"dataset {name!r} is to be watched every {interval} seconds.",
                "Give an interval above 0.",
                argument="interval",
                dataset=name,
            )
        self.error: Exception | None = None
        self.failing_since: datetime | None = None
        self.refreshed_at: datetime | None = None
        self._name, self._refresh, self._interval = name, refresh, interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    @property
    def running(self) -> bool:
        """Whether refreshes go on."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def start(self) -> Self:
        """Begin to refresh, once. Not done when it is made: what is refused then must have begun nothing."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the watch; a refresh that waits for its store is not waited for beyond 10 s."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_STOP)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            refresh = self._refresh()
            if refresh is None:
                return
            try:
                refresh()
            except AdjunctError as error:
                self._failed(error)
            except Exception as error:
                self._failed(error)
                raise
            else:
                self.error = self.failing_since = None
                self.refreshed_at = utc_now()
            finally:
                del refresh  # or this thread would keep the reader while it waits

    def _failed(self, error: Exception) -> None:
        if self.error is None or str(self.error) != str(error):
            _log.warning("dataset %s: can't look for a new version, the one held is read on: %s", self._name, error)
        self.error = error
        self.failing_since = self.failing_since or utc_now()
