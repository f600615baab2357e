from fractions import Fraction

import pytest

from glm5.env.quantities import parse_quantity


@pytest.mark.parametrize(("text", "value", "dimension"), [
    ("37 km", 37000, (1, 0, 0, 0)), ("4.7 m/s", Fraction(47, 10), (1, 0, -1, 0)), ("-2 m/s2", -2, (1, 0, -2, 0)),
    ("36 km/h", 10, (1, 0, -1, 0)), ("5mg", Fraction(5, 10**6), (0, 1, 0, 0)), ("3 kW", 3000, (2, 1, -3, 0)),
    (" 250 cm2 ", Fraction(1, 40), (2, 0, 0, 0)), ("2 l", Fraction(1, 500), (3, 0, 0, 0)),
    ("6 V/A", 6, (2, 1, -3, -2))])
def test_numbers_with_known_units_have_exact_values(text, value, dimension):
    quantity = parse_quantity(text)
    assert (quantity.value, quantity.dimension) == (value, dimension)


@pytest.mark.parametrize("text", ["", "37", "km", "37 parsec", "1e3 m", "3 7 m", "37 km and more", "37  m", "٣ m",
                                  "4. m", ".5 m", "5 m/", "5 m//s", "5 m0", "nan m", "inf m",
                                  "9" * 31 + " m", "5 m\n5 m"])
def test_everything_else_is_no_quantity(text):
    assert parse_quantity(text) is None


def test_units_of_one_dimension_are_equal_by_value():
    assert parse_quantity("0.1 km").equals(parse_quantity("100 m"))
    assert parse_quantity("6 ohm").equals(parse_quantity("6 V/A"))
    assert not parse_quantity("1 m").equals(parse_quantity("1 s"))
    assert not parse_quantity("1 m").equals(parse_quantity("1 km"))
