"""Links that leave docs/ have no target on the site: they become the path in the repository, which a reader finds there."""

from __future__ import annotations

import posixpath
import re

_LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(((?![a-z]+:|#)[^)\s]+)\)")


def rewritten(markdown: str, page: str) -> str:
    """`page`: its path below docs/."""

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if place.startswith("docs/"):
            return match[0]
        return text if text.strip("`") == place else f"{text} (`{place}` in the repository)"

    return _LINK.sub(replace, markdown)
