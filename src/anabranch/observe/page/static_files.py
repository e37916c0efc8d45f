"""Static files of the page, shipped as they are written: there is no build step and no outside resource."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from anabranch.observe.geography import geography_json

#: Scripts in an order in which each imports earlier ones only.
MODULES = (
    "words.js", "record.js", "stream.js", "theme.js", "chart.js", "layout.js", "river.js", "geography.js",
    "world.js", "map.js", "owner.js", "panels.js", "numbers.js", "main.js",
)  # fmt: skip
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def text_of(name: str) -> str:
    """Text of the static file `name` of the page, cached. geography.js is no file: it is made from the plots'
    map data."""
    if name == "geography.js":
        return f"export const GEOGRAPHY = {geography_json()};\n"
    return (resources.files(__package__) / "static" / name).read_text("utf-8")


def served() -> dict[str, tuple[str, bytes]]:
    """{path of a URL: (media type, bytes)} of all files that a browser may ask for; "/" is index.html."""
    names = ["index.html", "style.css", "icon.svg", *MODULES]
    kinds = {name: f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8" for name in names}
    files = {f"/{name}": (kinds[name], text_of(name).encode()) for name in names}
    return {**files, "/": files["/index.html"]}


def joined_script() -> str:
    """All scripts of the page, joined into one. Names are imported and exported under the same name, so it
    suffices to drop both kinds of statements."""
    parts = []
    for name in MODULES:
        text = re.sub(r'^import \{[^}]*\} from "[^"]*";\n', "", text_of(name), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def source_hash(text: str) -> str:
    """Text with which a content-security policy allows an inline script or style with exactly this text
    ('sha256-...')."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
