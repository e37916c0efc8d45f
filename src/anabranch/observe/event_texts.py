"""Texts inside events: made safe where other peers wrote them, and freed of paths of this machine, before the
events are written to the run's event log, which every observer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from anabranch.observe.events import Event
from anabranch.observe.wording import ERROR_MAX, plain

_E = TypeVar("_E", bound=Event)


def plain_event(event: _E) -> _E:
    """Copy of another peer's `event` whose texts are single lines of at most SENTENCE_MAX characters, without
    control characters (`plain`)."""
    return _changed(event, plain)


def own_event(event: _E, folder: Path) -> _E:
    """Copy of this peer's `event` as it is to be written: without the paths of this machine
    (`without_paths`), and with texts that are single lines of at most ERROR_MAX characters, without control
    characters, since it may quote another peer."""
    return _changed(without_paths(event, folder), lambda text: plain(text, ERROR_MAX))


def without_paths(event: _E, folder: Path) -> _E:
    """Copy of `event` with paths in `folder` (the run's, or a volunteer's home) relative to it, and `~` for
    the user's home: viewers need not know how their owner's disk is laid out."""
    replaced = {f"{folder}/": "", f"{folder.absolute()}/": "", str(folder.absolute()): "the run directory"}
    replaced |= {str(folder): "the run directory"} if len(folder.parts) > 1 else {}
    replaced |= {f"{Path.home()}/": "~/"} if len(Path.home().parts) > 1 else {}

    def change(text: str) -> str:
        for path, shown in replaced.items():
            text = text.replace(path, shown)
        return text

    return _changed(event, change)


def _changed(event: _E, change: Callable[[str], str]) -> _E:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    changes = {name: new for name, old in fields.items() if (new := _texts(old, change)) != old}
    return msgspec.structs.replace(event, **changes) if changes else event


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """Copy of a JSON value in which `change` was applied to each text, keys included; values that are no
    texts stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {_texts(key, change): _texts(item, change) for key, item in value.items()}
    return value
