"""Errors that are a person's to mend: one clear sentence, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program must change; the message says what happened, where, and what to do.

    Commands print it as one line on stderr and exit with status 2.
    """


class ConfigError(UserError, ValueError):
    """A run file that cannot be used; the message names file, key and what to do."""
