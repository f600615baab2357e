"""Types that a tool's JSON schema gives to its arguments, and the reading of argument text by them.

The chat format writes strings raw and everything else as JSON, so the text ``3`` is a number or a string only by the
schema. A key without a usable type is a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = frozenset({"string"})
_REFERENCE_DEPTH = 8


@dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """JSON types of each argument of one tool."""

    types: Mapping[str, frozenset[str]]

    @classmethod
    def of_tool(cls, tools: Sequence[Mapping[str, Any]] | None, name: str) -> ArgumentTypes:
        """Types declared for tool ``name``, with or without the ``function`` wrapper; none if it is not declared."""
        for tool in tools or ():
            function = tool.get("function") or tool
            if not isinstance(function, Mapping) or function.get("name") != name:
                continue
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return cls({key: _types_of(schema, parameters, 0) for key, schema in properties.items()})
        return cls({})

    def of_key(self, key: str) -> frozenset[str]:
        """Types that ``key`` may have; string when nothing is known."""
        return self.types.get(key, _TEXT) or _TEXT

    def is_text(self, key: str) -> bool:
        """True when the text of ``key`` is the value itself. A union with string is read as string."""
        return "string" in self.of_key(key)


def coerce(text: str, types: frozenset[str]) -> Any:
    """``text`` as a JSON value of one of ``types``; ``text`` itself when it is none."""
    stripped = text.strip()
    if "boolean" in types and stripped in ("True", "False"):
        return stripped == "True"
    if "null" in types and stripped == "None":
        return None
    try:
        value = json.loads(stripped)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value if _type_names(value) & types else text


def _type_names(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return _TEXT
    return frozenset({"array"}) if isinstance(value, list) else frozenset({"object"})


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Types that ``schema`` allows; empty when it says nothing that is understood."""
    if not isinstance(schema, Mapping) or depth > _REFERENCE_DEPTH:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    if isinstance(schema.get("$ref"), str):
        return _types_of(_resolve(schema["$ref"], root), root, depth + 1)
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*(_type_names(value) for value in schema["enum"]))
    if "const" in schema:
        return _type_names(schema["const"])
    unions = [schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)]
    options = [option for union in unions for option in union]
    return frozenset().union(*(_types_of(option, root, depth + 1) for option in options))


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of ``root`` that a local reference such as ``#/$defs/Point`` names; None if there is none."""
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
