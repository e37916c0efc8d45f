"""Reference of the Python interface, made from the signatures and docstrings of its public names."""

from __future__ import annotations

import ast
import inspect
import textwrap

import anabranch

#: Values among the public names, which the page describes by itself.
VALUES = ("PROTOCOL_VERSION", "RUN_DIRECTORY_VERSION", "__version__")


def functions() -> str:
    """A section for each public function, then for each public class with its methods."""
    public = {name: getattr(anabranch, name) for name in anabranch.__all__ if name not in VALUES}
    ours = {name: value for name, value in public.items() if not _is_config(value)}
    parts = [_function(name, value) for name, value in ours.items() if inspect.isfunction(value)]
    parts += [_class(name, value) for name, value in ours.items() if inspect.isclass(value)]
    return "\n\n".join(parts)


def _is_config(value: object) -> bool:
    """True for the run file's class, which has a page of its own."""
    return value is anabranch.RunConfig


def _function(name: str, function: object, level: str = "##") -> str:
    return f"{level} {name}\n\n{_signature(name, function)}\n\n{_words(function)}"


def _class(name: str, kind: type) -> str:
    parts = [f"## {name}\n\n{_words(kind)}"]
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            parts.append(f"**{name}.{member}**: {_words(value)}")
        elif isinstance(value, classmethod | staticmethod):
            parts.append(_function(f"{name}.{member}", value.__func__, "###"))
        elif inspect.isfunction(value):
            parts.append(_function(f"{name}.{member}", value, "###"))
        elif hasattr(value, "func"):
            parts.append(f"**{name}.{member}**: {_words(value.func)}")
    return "\n\n".join(parts)


def _signature(name: str, function: object) -> str:
    """Call of a function with its types and defaults as in its source; one a line if it is long."""
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    [definition] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)][:1]
    found = definition.args
    found.args = [one for one in found.args if one.arg not in ("self", "cls")]
    returns = "" if definition.returns is None else f" -> {ast.unparse(definition.returns)}"
    text = f"({ast.unparse(found)}){returns}"
    if len(name + text) > 100:
        parts = [_one(one, default) for one, default in _with_defaults(found.args, found.defaults)]
        parts += ["*"] if found.kwonlyargs else []
        pairs = zip(found.kwonlyargs, found.kw_defaults, strict=True)
        parts += [_one(one, default) for one, default in pairs]
        text = "(\n    " + ",\n    ".join(parts) + f",\n){returns}"
    return f"```python\n{name}{text}\n```"


def _with_defaults(
    parameters: list[ast.arg], defaults: list[ast.expr]
) -> list[tuple[ast.arg, ast.expr | None]]:
    missing: list[ast.expr | None] = [None] * (len(parameters) - len(defaults))
    return list(zip(parameters, [*missing, *defaults], strict=True))


def _one(parameter: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(parameter)
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _words(value: object) -> str:
    """Docstring as Markdown: its examples become blocks of Python."""
    lines = textwrap.dedent(inspect.getdoc(value) or "").splitlines()
    text: list[str] = []
    code = False
    for line in lines:
        if line.startswith(">>>") and not code:
            text.append("```python")
            code = True
        elif code and not line.strip():
            text.append("```")
            code = False
        text.append(line.split("  # doctest:")[0].rstrip() if code else line)
    if code:
        text.append("```")
    return "\n".join(text)
