"""Sections of keyed records that track their changes, and patches between two moments."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]
#: section -> key -> changed fields; None for a removed record.
Patch = dict[str, dict[str, Fields | None]]


class TrackedState:
    """State as section -> key -> fields, which collects a patch of its changes. All values are JSON values. A
    value must not be changed in place after it was set, as that change would be missed."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Fields]] = {}
        self._changed: Patch = {}

    def get(self, section: str, key: str) -> Fields:
        """Fields of a record, not to be changed; empty if there is none."""
        return self.sections.get(section, {}).get(key, {})

    def set(self, section: str, key: str, **fields: Any) -> None:
        """Set some fields of a record, which is created if missing; other fields stay. Values that are the
        same are no change."""
        record = self.sections.setdefault(section, {}).setdefault(key, {})
        new = {name: value for name, value in fields.items() if name not in record or record[name] != value}
        if not new:
            return
        record.update(new)
        changes = self._changed.setdefault(section, {})
        before = changes.get(key)
        if before is None:  # unchanged so far, or removed: then all fields are new
            changes[key] = new
        else:
            before.update(new)

    def drop(self, section: str, key: str) -> None:
        """Remove a record; nothing if there is none."""
        if self.sections.get(section, {}).pop(key, None) is not None:
            self._changed.setdefault(section, {})[key] = None

    def take_patch(self) -> Patch:
        """Return the changes since the last call (empty if none), and begin to collect the next ones."""
        changed, self._changed = self._changed, {}
        return changed


def merge(older: Patch, newer: Patch) -> Patch:
    """New patch that changes a state as `older` and then `newer` would; these do not change."""
    merged: Patch = {section: dict(records) for section, records in older.items()}
    for section, records in newer.items():
        into = merged.setdefault(section, {})
        for key, fields in records.items():
            before = into.get(key)
            into[key] = {**before, **fields} if before is not None and fields is not None else fields
    return merged
