"""Conversion of TOML files, TOML text and nested plain values to a RunConfig, and back to plain values."""

from __future__ import annotations

import difflib
import math
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from anabranch.config.constraints import is_64_bits
from anabranch.config.rules import check_rules
from anabranch.config.schema import RUN_FILE_VERSION, RunConfig, key_of
from anabranch.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


def parse_toml(text: str) -> dict[str, Any]:
    """Values of a TOML document, by key. Raises ValueError if it is not TOML or has an integer of too many
    digits, and RecursionError if it is nested too deeply."""
    values: dict[str, Any] = tomllib.loads(text)
    return values


def load_run_file(path: str | Path) -> RunConfig:
    """Read and check a run file (TOML). Raises ConfigError naming file, key, what is wrong and what to do."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; `anabranch init {path}` writes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise ConfigError(f"{path}: cannot be read: not UTF-8 text ({where})") from None
    return config_from_text(text, str(path))


def config_from_text(text: str, where: str) -> RunConfig:
    """Build and check a RunConfig from TOML text; `where` begins every message. Raises ConfigError as
    `config_from_dict`, and for what is not TOML."""
    try:
        data = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    return config_from_dict(data, where)


def config_from_dict(data: Mapping[str, Any], where: str = "run file") -> RunConfig:
    """Build and check a RunConfig from nested plain values, as TOML and JSON give them. `where` (a path, or
    the sender of the values) begins every message. Keys left out take their defaults; `[anabranch] version`
    is required. Raises ConfigError for another version, an unknown section or key, a value that is not
    allowed, and values that cannot work together."""
    _check_version(data, where)
    sections = typing.get_type_hints(RunConfig)
    built: dict[str, Any] = {}
    for name, content in data.items():
        if name == "anabranch":
            continue
        if name not in sections:
            raise ConfigError(f"{where}: unknown section [{name}]{_nearest(name, sections)}")
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where}: {name} must be a section: write [{name}] and its keys below it")
        built[name] = _section_from_dict(sections[name], name, content, where)
    config = RunConfig(**built)
    check_rules(config, where)
    return config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain values by section and key, with the version, tuples as lists, and without keys that are
    None; inverse of `config_from_dict`."""
    result: dict[str, Any] = {"anabranch": {"version": RUN_FILE_VERSION}}
    for section in fields(config):
        values = getattr(config, section.name)
        result[section.name] = {
            key_of(f.name): list(value) if isinstance(value, tuple) else value
            for f in fields(values)
            if (value := getattr(values, f.name)) is not None
        }
    return result


def with_changes(config: RunConfig, changes: Mapping[str, Any], where: str = "command line") -> RunConfig:
    """A new configuration: `config` with the values of dotted keys replaced, e.g. {"run.steps": 50}, checked
    as a whole. Raises ConfigError as `config_from_dict` does."""
    data = config_to_dict(config)
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        data.setdefault(section, {})[key] = value
    return config_from_dict(data, where)


def _check_version(data: Mapping[str, Any], where: str) -> None:
    header = data.get("anabranch")
    if not isinstance(header, Mapping) or "version" not in header:
        raise ConfigError(
            f"{where}: anabranch.version is missing; "
            f"begin the file with [anabranch] and `version = {RUN_FILE_VERSION}`"
        )
    for key in header:
        if key != "version":
            raise ConfigError(f"{where}: unknown key anabranch.{key}; [anabranch] holds `version` alone")
    version = header["version"]
    if version != RUN_FILE_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{where}: anabranch.version is {version!r}, but this program reads version {RUN_FILE_VERSION}; "
            "use the release that wrote the file, or write a new one with `anabranch init`"
        )


def _section_from_dict(kind: type, section: str, content: Mapping[str, Any], where: str) -> Any:
    hints = {key_of(name): (name, hint) for name, hint in typing.get_type_hints(kind).items()}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {section}.{key}{_nearest(key, hints)}")
        name, hint = hints[key]
        values[name] = _typed(value, hint, f"{where}: {section}.{key}")
    return replace(kind(), **values)


def _nearest(word: str, valid: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; valid here: {', '.join(valid)}"


def _typed(value: Any, hint: Any, label: str) -> Any:
    """`value` as the type of its field: an integer becomes a float where one is wanted, a list a tuple. hint:
    annotation of the field. `label` (where and key) begins the message. Raises ConfigError for a value of
    another type, an infinite or NaN float, and an integer beyond 64 bits. Constraints are checked elsewhere.
    """
    if type(None) in typing.get_args(hint):  # every optional field is `X | None`
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is tuple and str in typing.get_args(hint):
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f'{label} must be a list of strings like ["q_proj"], not {value!r}')
        return tuple(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(_is_int(v) for v in value):
            raise ConfigError(f"{label} must be a list of whole numbers like [2, 1, 1], not {value!r}")
        return tuple(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and _is_int(value):
        return value
    if hint is float and (_is_int(value) or isinstance(value, float)):
        if not math.isfinite(value):
            raise ConfigError(f"{label} must be a finite number, not {value!r}")
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[hint]
    raise ConfigError(f"{label} must be {wanted}, not {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and is_64_bits(value)
