"""A record added to the history, and a history that cannot be written told once: not with every decode."""

from __future__ import annotations

import logging
import threading

from .record import DecodeRecord
from .store import HistoryStore, StoreError

log = logging.getLogger("halo_vae")


class AppendLog:
    """Warns once per history and kind of failure, until an append succeeds again. Safe from any thread."""

    def __init__(self) -> None:
        """Nothing told yet."""
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def append(self, store: HistoryStore, record: DecodeRecord) -> bool:
        """Add a record; False where that fails, which never raises for a reason of the disk's."""
        where = str(store.path)
        try:
            store.append(record)
        except StoreError as error:
            if self._is_new(where, _kind_of(error)):
                log.warning("the decode was not added to the history: %s (told once, until it works again)", error)
            return False
        with self._lock:
            self._told = {told for told in self._told if told[0] != where}
        return True

    def _is_new(self, where: str, kind: str) -> bool:
        with self._lock:
            new = (where, kind) not in self._told
            self._told.add((where, kind))
            return new


PROCESS_LOG = AppendLog()
"""What this process has told."""


def append_or_warn(store: HistoryStore, record: DecodeRecord) -> bool:
    """Append a record to the history; where that fails, log why, once per kind of failure, and return False."""
    return PROCESS_LOG.append(store, record)


def _kind_of(error: StoreError) -> str:
    """The same for failures that one sentence tells: a full disk, a folder that may not be written, a lock."""
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    return type(cause or error).__name__ if number is None else str(number)
