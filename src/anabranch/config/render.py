"""Run file as commented TOML: every key with its sentence from `schema.py` above it."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from dataclasses import fields
from typing import Any

from anabranch.config import schema
from anabranch.config.schema import RUN_FILE_VERSION, RunConfig, key_of


def render_run_file(config: RunConfig) -> str:
    """Commented TOML of `config`; `load_run_file` reads it back as an equal configuration."""
    sentences = docstrings()
    lines = [
        "# A run of anabranch: `anabranch train` runs it here, `anabranch start` opens it to others.",
        "",
        "[anabranch]",
        "# Version of this file's format.",
        f"version = {RUN_FILE_VERSION}",
    ]
    for section in fields(config):
        values = getattr(config, section.name)
        lines += ["", f"# {sentences[type(values).__name__]}", f"[{section.name}]"]
        for f in fields(values):
            key, value = key_of(f.name), getattr(values, f.name)
            lines.append(f"# {sentences[f'{type(values).__name__}.{f.name}']}")
            # TOML has no null: an unset key is shown as a comment, ready to be filled in.
            lines.append(f"{key} = {_toml(value)}" if value is not None else f"#{key} =")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Value as TOML: JSON with the character DEL escaped, which JSON allows bare and TOML does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@functools.cache
def docstrings() -> dict[str, str]:
    """Sentences of the run file's comments: docstrings in the source of `schema.py`, each on one line, by
    "Class" and "Class.field"."""
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = " ".join((ast.get_docstring(node) or "").split())
        for target, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(target, ast.AnnAssign)
                and isinstance(target.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[f"{node.name}.{target.target.id}"] = " ".join(str(below.value.value).split())
    return found
