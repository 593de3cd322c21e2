"""Frozen dataclasses to JSON values and back, checked against their type hints."""

from __future__ import annotations

import enum
import functools
import math
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A JSON-safe copy: dataclasses become objects, tuples lists, enums their values.

    inf and nan, which JSON lacks, become the strings "inf", "-inf" and "nan". ValueError for any other type.
    """
    if isinstance(value, enum.Enum):  # before str: a str enum is both
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        # columns of many thousand whole numbers are common, and need no look at each number's type hints
        return list(value) if _all_int(value) else [encode(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    raise ValueError(f"a {type(value).__name__} cannot be written as JSON; records hold numbers, text and tuples")


def decode(kind: type[T], value: Any, where: str = "record") -> T:
    """Build a `kind` from what `encode` gave. ValueError names a missing, unknown or mistyped field."""
    built: T = _decode(kind, value, where)
    return built


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_optional(kind, value, where)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(map(repr, get_args(kind)))}")
        return value
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(repr(m.value) for m in kind)}") from None
    if is_dataclass(kind):
        return _decode_fields(kind, value, where)
    return _decode_scalar(kind, value, where)


def _decode_optional(kind: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    (inner,) = (a for a in get_args(kind) if a is not type(None))
    return _decode(inner, value, where)


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r}; a list is needed")
    if len(args) == 2 and args[1] is Ellipsis:
        if args[0] is int and _all_int(value):
            return tuple(value)
        return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(args):
        raise ValueError(f"{where} has {len(value)} items; {len(args)} are needed")
    return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}; an object is needed")
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise ValueError(f"{where} has unknown fields {sorted(unknown)}; it may come from another version")
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if missing := needed - value.keys():
        raise ValueError(f"{where} lacks {sorted(missing)}; the record is incomplete")
    return kind(**{name: _decode(hints[name], v, f"{where}.{name}") for name, v in value.items()})


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        if isinstance(value, str) and value in ("inf", "-inf", "nan"):
            return float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind):
        return value
    raise ValueError(f"{where} is {value!r}; {kind.__name__} is needed")


def _all_int(values: Sequence[Any]) -> bool:
    """True for plain whole numbers alone: bool and IntEnum are others."""
    return all(type(v) is int for v in values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
