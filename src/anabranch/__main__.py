"""`python -m anabranch` is the command `anabranch`."""

from anabranch.cli.main import entry

entry()
