"""
Text from outside on its way to a terminal: what would steer the terminal is spelled out instead.

A worker's message, a host's name or a journal may hold escape sequences that rewrite the screen, change the title or type a
command. Everything that we print of such text goes through here. What workers print themselves is theirs and stays as it is.
"""

from __future__ import annotations

_KEPT = "\n\t"
_STEERING = (
    *(chr(number) for number in range(0x20) if chr(number) not in _KEPT),
    *(chr(number) for number in range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",  # order of the writing
)
_SPELLED = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in _STEERING})


def printable(text: str) -> str:
    """The text with control characters in the form `\\u001b`, which in JSON means the same as before. Lines and tabs stay."""
    return text.translate(_SPELLED)
