"""What the user has set in the host's own settings dialog, checked; the environment comes first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..profiling.record import Level
from ..profiling.render.units import ByteUnits
from ..profiling.store import MAX_BYTES

log = logging.getLogger("halo_vae")
PROFILE_VARIABLE = "HALO_VAE_PROFILE"
PROFILE, HISTORY_SIZE, PANEL, UNITS = "HaloVAE.Profile", "HaloVAE.HistorySize", "HaloVAE.Panel", "HaloVAE.Units"
"""Ids of the settings in the host's dialog and in its settings file."""
MOST_MIB = 4096
"""Largest history file that can be asked for."""
_LEVELS: dict[str, Level] = {"off": "off", "summary": "summary", "per_op": "per_op"}
_UNITS: dict[str, ByteUnits] = {"binary": "binary", "decimal": "decimal"}
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSettings:
    """The settings in force."""

    level: Level = "summary"
    """How much of a decode is recorded."""
    level_from: Literal["default", "settings", "environment"] = "default"
    history_bytes: int = MAX_BYTES
    """Size at which the history's file is set aside."""
    units: ByteUnits = "binary"
    """Of bytes in the nodes' text."""
    panel: bool = True
    """Whether the page shows panels on nodes, and so wants to hear of progress."""


def settings_of(given: Mapping[str, Any], environ: Mapping[str, str], warn: Warn) -> UserSettings:
    """The settings in a host's file, `environ` first; what cannot be used is told to `warn` and left at its default."""
    level, level_from = _level(given, environ, warn)
    return UserSettings(
        level=level, level_from=level_from, history_bytes=_history_bytes(given, warn),
        units=_choice(UNITS, given.get(UNITS), _UNITS, "binary", warn), panel=_switch(PANEL, given.get(PANEL), warn),
    )  # fmt: skip


def read_level(environ: Mapping[str, str], warn: Warn = log.warning) -> Level:
    """The profile level that the environment asks for; `summary` unless it does."""
    level: Level = _choice(PROFILE_VARIABLE, environ.get(PROFILE_VARIABLE), _LEVELS, "summary", warn)
    return level


def _level(
    given: Mapping[str, Any], environ: Mapping[str, str], warn: Warn
) -> tuple[Level, Literal["default", "settings", "environment"]]:
    if environ.get(PROFILE_VARIABLE, "").strip():
        return read_level(environ, warn), "environment"
    level = _choice(PROFILE, given.get(PROFILE), _LEVELS, "summary", warn)
    return level, "settings" if PROFILE in given else "default"


def _choice(name: str, value: object, allowed: Mapping[str, Any], default: str, warn: Warn) -> Any:
    if value is None:
        return allowed[default]
    found = allowed.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        *first, last = allowed
        warn(f"{name} is {_shown(value)}; it may be {', '.join(first)} or {last}. Using {default}.")
    return allowed[default] if found is None else found


def _history_bytes(given: Mapping[str, Any], warn: Warn) -> int:
    value = given.get(HISTORY_SIZE)
    if value is None:
        return MAX_BYTES
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= MOST_MIB:
        return int(value * (1 << 20))
    default = MAX_BYTES >> 20
    warn(f"{HISTORY_SIZE} is {_shown(value)}; it may be 1 to {MOST_MIB} MiB. Using {default}.")
    return MAX_BYTES


def _switch(name: str, value: object, warn: Warn) -> bool:
    if value is None or isinstance(value, bool):
        return value is not False
    warn(f"{name} is {_shown(value)}; it may be true or false. Using true.")
    return True


def _shown(value: object) -> str:
    return repr(value)[:60]


class SettingsReader:
    """Reads the settings before each decode, so that a change needs no restart; warns once of each bad value."""

    def __init__(self, given: Callable[[], Mapping[str, Any]], environ: Mapping[str, str] | None = None) -> None:
        """`given()` is what the host's settings file holds now; `environ` stands in for the process's own in tests."""
        self._given = given
        self._environ = os.environ if environ is None else environ
        self._warned: set[str] = set()

    def read(self) -> UserSettings:
        """The settings in force now; never raises."""
        try:
            given = self._given()
        except Exception as error:  # somebody else's file, read by somebody else's code
            self._warn(f"the settings of Halo VAE cannot be read ({type(error).__name__}); defaults are used")
            given = {}
        return settings_of(given, self._environ, self._warn)

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            log.warning("%s", sentence)
