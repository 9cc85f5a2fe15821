"""
The page of error codes, made from the enum.

    python -m tools.error_codes    # dlrover/protocol/error_codes.py -> docs/reference/error-codes.md
"""

from __future__ import annotations

from pathlib import Path

from dlrover.protocol.error_codes import ErrorCode

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "error-codes.md"
HEAD = """\
# Error codes

A refusal has a code for programs and a message for people. The message names the values; this page says what each code
means and what you can do. `python -m tools.error_codes` writes it from `dlrover/protocol/error_codes.py`.

The value of a code does not change between versions. A newer peer may send a code that an older one does not know: the
older one treats it as a refusal without a special meaning, and shows its message.
"Nothing" means that DLRover acts by itself: you see the code in a log, and no action of yours is needed.

| Code | Meaning | What to do |
|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(f"| `{code}` | {code.meaning} | {code.remedy} |\n" for code in sorted(ErrorCode))


if __name__ == "__main__":
    PAGE.write_text(page())
