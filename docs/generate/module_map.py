"""Map of all modules, made from the docstrings of packages and modules."""

from __future__ import annotations

import ast
from pathlib import Path

from generate import PACKAGE, code, escaped, table


def packages() -> list[Path]:
    """Every package folder, parents before children, in the order of their paths."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    return sorted(folders, key=lambda folder: folder.relative_to(PACKAGE).parts)


def modules(folder: Path) -> list[Path]:
    """Modules of one package, without its `__init__`."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def docstring(path: Path) -> str:
    """Docstring of a source file, "" where it has none or where the file is missing."""
    if not path.exists():
        return ""
    text = path.read_text("utf-8")
    if text.startswith('"""'):
        text = text[: text.index('"""', 3) + 3]  # parsing the whole file would take most of the map's time
    return ast.get_docstring(ast.parse(text)) or ""


def summary(path: Path) -> str:
    """First paragraph of the docstring of a source file, on one line."""
    return " ".join(docstring(path).split("\n\n")[0].split())


def module_map() -> str:
    """One section for each package, with a table of its modules."""
    parts = []
    for folder in packages():
        name = ".".join(["anabranch", *folder.relative_to(PACKAGE).parts])
        level = "##" if name.count(".") < 2 else "###"
        about = "\n".join(line for line in docstring(folder / "__init__.py").splitlines() if line.strip())
        parts.append(f"{level} {name}" + (f"\n\n{escaped(about)}" if about else ""))
        rows = [[code(path.stem), escaped(summary(path))] for path in modules(folder)]
        if rows:
            parts.append(table(["module", "subject"], rows))
    return "\n\n".join(parts)
