"""Options of connected sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.net.tcp.sockets import tune


def test_a_connection_that_is_gone_already_is_an_error_of_the_connection() -> None:
    """uvloop has no socket for a transport that it closed, as when the other process was killed."""
    lane = SimpleNamespace(transport=SimpleNamespace(get_extra_info=lambda name: None))
    with pytest.raises(ConnectionError, match="lost"):
        tune(cast(Any, lane))
