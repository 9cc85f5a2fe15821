"""
What no message can carry, and texts made fit for one.

A file name that is no UTF-8 reaches Python as halves of characters (lone surrogates), and from there an exception's text. They can be
compared and printed like any other, and only the code that encodes them finds out. Texts of users are cleaned where they come in.
"""

from __future__ import annotations

UNENCODABLE = (ValueError, TypeError, OverflowError, RecursionError)
"""What the encoder raises: for half a character, a number of more than 64 bits, something that is no message."""


def encodable(text: str) -> str:
    """With a question mark for each half of a character."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
