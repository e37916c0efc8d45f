"""Checks of the source tree: folders, imports, layers, parts that know the whole.

The source is read, never imported. Every check takes a `Tree` and returns what is wrong, a sentence each, so
that a test can show on a small tree of its own that the check can fail.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: Modules that a folder may hold besides its `__init__`; a reader does not take in more at a glance.
MOST_MODULES = 15
#: Last line of a package's docstring: the packages that may import it.
IMPORTED_BY = re.compile(r"^Imported by: (.+?)\.$", re.MULTILINE | re.DOTALL)
#: Imported by everything: the modules that stand below all packages.
EVERYONE = "everything"


@dataclass(frozen=True)
class Tree:
    """Package at `root`; names of modules are relative to it and dotted ("" is the package itself)."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Path]:
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def sources(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text("utf-8")) for name, path in self.modules.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of this tree that it imports anywhere, for type checking too."""
        return {name: set(self._imported(name)) - {name} for name in self.modules}

    def _imported(self, importer: str) -> Iterator[str]:
        top = self.root.name
        inside = importer if self.is_package(importer) else importer.rpartition(".")[0]
        for node in statements(self.sources[importer]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = [top, *filter(None, inside.split("."))]
                    base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name == top or name.startswith(top + "."):
                    yield self._module_of(name[len(top) + 1 :])

    def _module_of(self, name: str) -> str:
        """Module that `name` is or is defined in."""
        while name not in self.modules and name:
            name = name.rpartition(".")[0]
        return name

    def is_package(self, module: str) -> bool:
        return self.modules[module].name == "__init__.py"

    def package_of(self, module: str) -> str:
        """Package of a module. A module beside the packages stands for itself."""
        if self.is_package(module):
            return module
        return module.rpartition(".")[0] or module

    @cached_property
    def package_imports(self) -> dict[str, set[str]]:
        """Package -> other packages that its modules import."""
        found: dict[str, set[str]] = defaultdict(set)
        for importer, imported in self.imports.items():
            found[self.package_of(importer)] |= {self.package_of(name) for name in imported}
        return {package: names - {package} for package, names in found.items()}


def statements(module: ast.Module) -> Iterator[ast.AST]:
    """All statements at any depth; expressions, which are most of a tree, are not visited."""
    nodes: list[ast.AST] = [module]
    while nodes:
        yield (node := nodes.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())


def crowded_folders(tree: Tree, exempt: Iterable[str] = ()) -> list[str]:
    """Folders with more than MOST_MODULES modules."""
    count: dict[str, int] = defaultdict(int)
    for name in tree.modules:
        if not tree.is_package(name):
            count[name.rpartition(".")[0]] += 1
    return [
        f"{folder} holds {n} modules"
        for folder, n in count.items()
        if n > MOST_MODULES and folder not in exempt
    ]


def cycles(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Cycles among the keys of `arrows` (name -> names that it points to), one of each knot (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in arrows:
                continue
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            knot = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(knot) > 1:
                found.append("cycle: " + ", ".join(sorted(knot)))

    for name in arrows:
        if name not in index:
            visit(name)
    return found


def declared_importers(tree: Tree) -> dict[str, set[str]]:
    """Package -> packages that its docstring lets import it ("Imported by: ...")."""
    found = {}
    for name in tree.modules:
        if name and tree.is_package(name):
            declared = IMPORTED_BY.search(ast.get_docstring(tree.sources[name]) or "")
            if declared is not None:
                found[name] = {word.strip() for word in declared[1].replace("\n", " ").split(",")}
    return found


def undeclared_packages(tree: Tree) -> list[str]:
    """Packages whose docstring does not say what may import them, or names what is not there."""
    declared = declared_importers(tree)
    packages = {name for name in tree.modules if name and tree.is_package(name)}
    wrong = [f"{name} does not say who may import it" for name in sorted(packages - declared.keys())]
    for name, importers in declared.items():
        unknown = {other for other in importers - {EVERYONE, "nothing"} if other not in tree.modules}
        wrong += [f"{name} names {other}, which does not exist" for other in sorted(unknown)]
    return wrong


def forbidden_arrows(tree: Tree) -> list[str]:
    """Imports between packages that the imported package's docstring does not allow. A package may import its
    own sub-packages' parent and children only if they say so, as any other."""
    declared, wrong = declared_importers(tree), []
    for importer, imported in sorted(tree.package_imports.items()):
        for package in sorted(imported & declared.keys()):
            allowed = declared[package]
            names = {importer, *ancestors(importer)}
            if EVERYONE not in allowed and not names & allowed:
                wrong.append(f"{importer or 'the top package'} imports {package}, which does not allow it")
    return wrong


def ancestors(name: str) -> list[str]:
    """Packages that hold `name`, without the top one."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


#: Annotations of an attribute `peer` that holds the id of a peer, not the peer itself.
IDS = ("str", "str | None", "Id")


def parts_that_know_the_whole(tree: Tree, area: str, whole: str = "peer") -> list[str]:
    """Parts in `area` that hold the composer: classes that reach through `self.<whole>`, set it to something
    that is not annotated as an id, or keep an object of the composer's class (`Peer`) under any name."""
    wrong = []
    for name, source in tree.sources.items():
        if name.split(".")[0] != area:
            continue
        for node in ast.walk(source):
            if isinstance(node, ast.Attribute) and _is_own(node.value, whole):
                wrong.append(f"{name}:{node.lineno} reaches through {ast.unparse(node.value)}")
            if isinstance(node, ast.ClassDef):
                wrong += [f"{name}:{line} {what}" for line, what in _kept(node, whole)]
    return wrong


def _is_own(node: ast.AST, attribute: str) -> bool:
    """True for `self.<attribute>`, with or without underscores."""
    if not isinstance(node, ast.Attribute) or node.attr.strip("_") != attribute:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _kept(owner: ast.ClassDef, whole: str) -> list[tuple[int, str]]:
    """(line, words) of the fields and assignments by which a class keeps the whole."""
    found: list[tuple[int, str]] = []
    for field in owner.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            kind = ast.unparse(field.annotation)
            if _is_whole(kind, whole) or (field.target.id.strip("_") == whole and kind not in IDS):
                found.append((field.lineno, f"has the field {field.target.id}: {kind}"))
    for method in (each for each in owner.body if isinstance(each, ast.FunctionDef)):
        given = {each.arg: each.annotation for each in [*method.args.args, *method.args.kwonlyargs]}
        kinds = {name: ast.unparse(kind) for name, kind in given.items() if kind is not None}
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target, value in (pair for each in targets for pair in _pairs(each, node.value)):
                if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                    continue
                kind = kinds.get(value.id, "") if isinstance(value, ast.Name) else ""
                if _is_whole(kind, whole) or (_is_own(target, whole) and kind not in IDS):
                    found.append((node.lineno, f"keeps {ast.unparse(target)}"))
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment with their values, those of `a, b = c, d` one by one."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
    return list(zip(target.elts, values, strict=True))


def _is_whole(kind: str, whole: str) -> bool:
    """True for an annotation that names the composer's class."""
    return whole.capitalize() in re.findall(r"\w+", kind)


def outside_writers(tree: Tree, area: str, home: str, bundle: str, components: Iterable[str]) -> list[str]:
    """Assignments to fields of the shared `bundle.<component>` in `area`, outside the package `home`."""
    names, wrong = set(components), []
    for name, source in tree.sources.items():
        if name.split(".")[0] != area or name.startswith(home):
            continue
        for node in ast.walk(source):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            for target in (item for one in targets for item in ast.walk(one)):
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                    path = ast.unparse(target).split(".")
                    if len(path) > 2 and path[-3].strip("_") == bundle and path[-2] in names:
                        wrong.append(f"{name}:{target.lineno} assigns {ast.unparse(target)}")
    return wrong
