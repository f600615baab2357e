"""TOML → frozen dataclass, with one clear line for every mistake.

A file may name one base with ``extends = "other.toml"`` (relative to itself); its own keys win, tables merge. Then come
dotted overrides such as ``optimizer.lr=3e-4``, whose values are read as TOML (bare words as strings).
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from glm5.errors import ConfigError

T = TypeVar("T")


def require_at_least(least: float, **values: float) -> None:
    """Raise ConfigError naming the first of ``values`` that is below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}={value} is below {least}; raise it")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of ``path`` merged over those of the file that it extends.

    Raises ConfigError when a file is missing, is not TOML, or extends a file that extends another.
    """
    data = _parse_toml(Path(path))
    base_name = data.pop("extends", None)
    if base_name is None:
        return data
    base_path = Path(path).parent / str(base_name)
    base = _parse_toml(base_path)
    if "extends" in base:
        raise ConfigError(f"{base_path}: extends: a base file may not extend another; inline {base['extends']!r}")
    return _merge(base, data)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``data`` with ``a.b=value`` assignments applied; values are TOML, bare words are strings."""
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {item!r}: expected key=value, for example optimizer.lr=3e-4")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        nested: Any = value
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        data = _merge(data, nested)
    return data


def build_config(cls: type[T], data: dict[str, Any], source: str) -> T:
    """Validate ``data`` as dataclass ``cls``; unknown keys are errors. ``source`` names the file in messages."""
    try:
        return TypeAdapter(cls).validate_python(data, extra="forbid")
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_mistake(cls, error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read ``path``, apply ``overrides``, validate as ``cls``."""
    return build_config(cls, apply_overrides(read_toml(path), overrides), str(path))


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _first_mistake(cls: type, error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(top level)"
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        names = _field_names(cls, [part for part in first["loc"][:-1] if isinstance(part, str)])
        close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(names))}"
        return f"{key}: unknown key; {hint}"
    if first["type"] in ("missing", "missing_argument"):
        return f"{key}: missing; add it"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{key}: {cause}" if first["loc"] else str(cause)
    return f"{key}: {first['msg']}; got {first['input']!r}"


def _field_names(cls: type, path: list[str]) -> list[str]:
    """Field names of the dataclass that ``path`` leads to from ``cls``."""
    for part in path:
        hints = typing.get_type_hints(cls)
        if part not in hints:
            break
        options = typing.get_args(hints[part]) if _is_union(hints[part]) else (hints[part],)
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        if not nested:
            break
        cls = typing.cast(type, nested[0])
    return [item.name for item in dataclasses.fields(cls)]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
