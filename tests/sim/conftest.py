from collections.abc import Iterator

import pytest

from anabranch.protocol.leader import Leader
from anabranch.train.numerics import configure

configure(threads=1)


@pytest.fixture
def newcomers_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who is ready serves from the iteration after the open one, as if its stage had settled before."""
    monkeypatch.setattr(Leader, "_begins", lambda self, member, ready_t, active_from: active_from)
    yield
