"""Runner of the tutorials: its stand-ins are for commands of the pages, and all commands are understood."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from anabranch.cli.main import build_parser

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import run_tutorials


def test_stand_ins_are_for_commands_of_the_pages() -> None:
    assert set(run_tutorials.STAND_INS) <= set(run_tutorials.page_names())
    for page, stand_ins in run_tutorials.STAND_INS.items():
        assert stand_ins.keys() <= set(run_tutorials.commands(page)), page
    assert all(instead.why for page in run_tutorials.STAND_INS.values() for instead in page.values())


@pytest.mark.parametrize("page", run_tutorials.page_names())
def test_a_page_s_commands_are_understood(page: str) -> None:
    for command in run_tutorials.commands(page):
        arguments = shlex.split(command.replace("PID", "1"), comments=True)
        if arguments[0] == "anabranch":
            assert build_parser(arguments[1:]).parse_args(arguments[1:]).command == arguments[1]
