"""Physical quantities as text: "4.7 m/s" → exact value in SI units and dimension. Free of torch.

Values are fractions, so that 0.1 km is 100 m. What is not a number with a known unit is no quantity, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = re.compile(r"([+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z][A-Za-z0-9/]*)")
_FACTOR = re.compile(r"([A-Za-z]+)([1-9])?")
Dimension = tuple[int, int, int, int]
"""Exponents of metre, kilogram, second, ampere."""
_UNITS: dict[str, tuple[Fraction, Dimension]] = {
    name: (Fraction(factor), dimension) for name, factor, dimension in (
        ("m", 1, (1, 0, 0, 0)), ("km", 1000, (1, 0, 0, 0)), ("cm", "1/100", (1, 0, 0, 0)),
        ("mm", "1/1000", (1, 0, 0, 0)),
        ("kg", 1, (0, 1, 0, 0)), ("g", "1/1000", (0, 1, 0, 0)), ("mg", "1/1000000", (0, 1, 0, 0)),
        ("t", 1000, (0, 1, 0, 0)),
        ("s", 1, (0, 0, 1, 0)), ("ms", "1/1000", (0, 0, 1, 0)), ("min", 60, (0, 0, 1, 0)), ("h", 3600, (0, 0, 1, 0)),
        ("l", "1/1000", (3, 0, 0, 0)), ("ml", "1/1000000", (3, 0, 0, 0)), ("A", 1, (0, 0, 0, 1)),
        ("N", 1, (1, 1, -2, 0)), ("kN", 1000, (1, 1, -2, 0)), ("J", 1, (2, 1, -2, 0)), ("kJ", 1000, (2, 1, -2, 0)),
        ("W", 1, (2, 1, -3, 0)), ("kW", 1000, (2, 1, -3, 0)), ("V", 1, (2, 1, -3, -1)), ("ohm", 1, (2, 1, -3, -2)),
        ("Pa", 1, (-1, 1, -2, 0)), ("Hz", 1, (0, 0, -1, 0)))}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with its unit."""

    value: Fraction
    """In SI base units."""
    dimension: Dimension
    unit: str
    """As it was written."""

    def equals(self, other: Quantity) -> bool:
        """Same value and dimension, whatever the units."""
        return (self.value, self.dimension) == (other.value, other.dimension)


def parse_quantity(text: str) -> Quantity | None:
    """``number unit``, where a unit is known symbols, with an exponent from 1 to 9 behind them, joined by ``/``."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    value, dimension = Fraction(match[1]), (0, 0, 0, 0)
    for position, part in enumerate(match[2].split("/")):
        factor = _FACTOR.fullmatch(part)
        if factor is None or factor[1] not in _UNITS:
            return None
        size, exponents = _UNITS[factor[1]]
        power = int(factor[2] or 1) * (1 if position == 0 else -1)
        value *= size**power
        dimension = tuple(old + power * new for old, new in zip(dimension, exponents, strict=True))
    return Quantity(value, dimension, match[2])
