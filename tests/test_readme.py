"""The README's commands are ones that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from anabranch.cli.main import build_parser

README = Path(__file__).parent.parent / "README.md"


def commands() -> list[str]:
    blocks = re.findall(
        r"^```\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    lines = [line.removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [line.removeprefix("anabranch ") for line in lines if line.startswith("anabranch ")]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_is_understood(command: str) -> None:
    arguments = shlex.split(command, comments=True)
    parsed = build_parser(arguments).parse_args(arguments)
    assert parsed.command == arguments[0]


def test_the_readme_has_commands_and_its_files_are_there() -> None:
    assert {command.split()[0] for command in commands()} >= {"init", "train", "start", "join", "verify"}
    for link in re.findall(r"\]\((docs/[^)]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link


def test_the_files_that_its_commands_write_are_no_changes_of_the_checkout() -> None:
    ignored = (README.parent / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/run.toml", "/runs/"} <= set(ignored)
