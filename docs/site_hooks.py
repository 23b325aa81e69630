"""What the site needs beyond the pages as they are, which are written for a reader of the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")
BLOCK = re.compile(r"(^```.*?^```$)", re.S | re.M)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link that leads out of docs/ becomes a link into ``repo_url``, or without one the path alone."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f"`{path}`" if posixpath.basename(path) == text else f"{text} (`{path}`)"

    parts = BLOCK.split(markdown)
    return "".join(part if BLOCK.match(part) else LINK.sub(replace, part) for part in parts)
