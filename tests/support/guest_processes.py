"""Process of a hostile guest that may do any deed, those of the chaos test and those of tests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from anabranch.node.chaos.guests.guest_process import run_guest
from anabranch.node.chaos.guests.member_deeds import DEEDS
from support.further_deeds import FURTHER
from support.lying_peer import LyingPeer
from support.state_deeds import STATE_DEEDS
from support.work_deeds import WORK_DEEDS


def run_further_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest that may do any deed (see `run_guest`)."""
    deeds = DEEDS | FURTHER | STATE_DEEDS | WORK_DEEDS
    run_guest(name, arguments, log, namespace, environment, deeds, LyingPeer)
