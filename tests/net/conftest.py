"""Settings of the network room's tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing on a machine that others use, too.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
