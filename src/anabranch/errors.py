"""Errors that the user can correct: one clear sentence, no traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

#: Errors of a system whose disk, descriptors or memory are used up: they pass once there is room.
_USED_UP = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class UserError(Exception):
    """A problem outside the program. The message says what happened, where, and what to do.

    Commands print it as one line on stderr and exit with status 2.
    """


class ConfigError(UserError, ValueError):
    """An unusable run file. The message names the file, the key and what to do."""


def used_up(error: BaseException | None) -> bool:
    """True for an OSError which says that disk, descriptors or memory are used up, and for an error that was
    raised in place of one or while one was handled. MemoryError and torch's errors do not count."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _USED_UP:
            return True
        error = error.__cause__ or error.__context__
    return False


def words_of(error: UserError | OSError) -> str:
    """Reason of an error, for its user: the message, or the file and what the system says of it."""
    if isinstance(error, OSError):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    return str(error)


@contextmanager
def os_errors_named(problem: str, advice: str = "") -> Iterator[None]:
    """Context in which an OSError, e.g. of a full disk, becomes a UserError "PROBLEM: reason; ADVICE".
    advice: "" for none. Other exceptions pass."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{problem}: {error.strerror}" + (f"; {advice}" if advice else "")) from None


@contextmanager
def missing_package_named(problem: UserError) -> Iterator[None]:
    """Context of the import of an optional package: raises `problem` if that fails."""
    try:
        yield
    except ImportError:
        raise problem from None
