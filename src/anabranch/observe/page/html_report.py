"""Report of a run: page, replay and data in one HTML file, which opens from disk without a network."""

from __future__ import annotations

import base64
import gzip

import msgspec

from anabranch.observe.page.server import NO_MARKUP
from anabranch.observe.page.static_files import joined_script, source_hash, text_of
from anabranch.observe.view.recording import Recording


def report_html(recording: Recording) -> str:
    """HTML of the report of a recorded run, in which its recording is embedded. Ends the recording's frame in
    the making. The data is in base64, so untrusted texts in it are inert."""
    recording.cut()
    data = gzip.compress(msgspec.json.encode(recording.document()), mtime=0)
    style, script = text_of("style.css"), joined_script()
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; " + NO_MARKUP
    )
    icon = "data:image/svg+xml;base64," + base64.b64encode(text_of("icon.svg").encode()).decode()
    page = text_of("index.html")
    for old, new in (
        ('<link rel="icon" href="icon.svg">', f'<link rel="icon" href="{icon}">'),
        (
            '<link rel="stylesheet" href="style.css">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>',
        ),
        (
            '<script type="module" src="main.js"></script>',
            f'<script type="text/plain" id="recording">{base64.b64encode(data).decode()}</script>\n'
            f'<script type="module">{script}</script>',
        ),
    ):
        if page.count(old) != 1:
            raise ValueError(f"index.html must have {old} once")
        page = page.replace(old, new)
    return page
