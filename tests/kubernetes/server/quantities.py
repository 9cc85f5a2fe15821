"""Quantities such as `500m` or `2Gi`, read as a real server reads them."""

from __future__ import annotations

import re
from fractions import Fraction

_WHOLE = re.compile(r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$")
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
WRONG_FORM = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"


def quantity(text: str | int | float) -> Fraction:
    """The value; `ValueError` with a real server's sentence if the text is no quantity."""
    found = _WHOLE.match(str(text))
    if found is None:
        raise ValueError(WRONG_FORM)
    number, suffix = found[1], found[2]
    try:
        value = Fraction(number)
    except ValueError:
        raise ValueError("unable to parse numeric part of quantity") from None
    if suffix in _BINARY:
        return value * 1024 ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return value * Fraction(10) ** _DECIMAL[suffix]
    exponent = re.fullmatch(r"[eE]([-+]?[0-9]+)", suffix)
    if exponent is None:
        raise ValueError("unable to parse quantity's suffix")
    return value * Fraction(10) ** int(exponent[1])


def shown_quantity(value: Fraction) -> str:
    """The short decimal form: whole numbers plain, parts in thousandths."""
    return str(int(value)) if value.denominator == 1 else f"{int(value * 1000)}m"
