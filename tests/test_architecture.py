"""The structure of the source: folders, layers, cycles, shared state, docstrings, the module map.

Each check is shown, on a small tree made for it, to refuse what it is there to refuse.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from generate import module_map

from support import architecture
from support.architecture import Tree

ROOT = Path(anabranch.__file__).parent
REPOSITORY = Path(__file__).parents[1]
#: Folders with one small module per command.
COMMANDS = ("cli",)
#: Packages that decide and touch no world: no sockets, clock, dice, threads, files or tensors.
SANS_IO = ("flow", "protocol")
#: Yardsticks that see the whole graph, never part of a peer's decision: their solver is allowed.
SOLVER = {"flow.graph.oracle": {"scipy"}, "flow.graph.fair_shares": {"scipy"}}
THIRD_PARTY = {"numpy", "msgspec"}
#: Parts of the standard library that reach for the world.
WORLDLY = {
    *("asyncio", "concurrent", "http", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *("selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "tempfile", "threading"),
    *("time", "urllib", "uuid"),
}
#: Components of a peer's context (protocol/context/peer_context.py) that change by their own methods alone.
COMPONENTS = ("clock", "outbox", "tasks", "links", "dialer", "run", "log")


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def test_folders_hold_about_a_dozen_modules(tree: Tree) -> None:
    assert not architecture.crowded_folders(tree, exempt=COMMANDS)


def test_files_import_without_a_cycle(tree: Tree) -> None:
    assert not architecture.cycles(tree.imports)


def test_packages_import_without_a_cycle(tree: Tree) -> None:
    assert not architecture.cycles(tree.package_imports)


def test_every_package_says_who_may_import_it(tree: Tree) -> None:
    assert not architecture.undeclared_packages(tree)


def test_packages_are_imported_by_those_that_they_name(tree: Tree) -> None:
    assert not architecture.forbidden_arrows(tree)


def test_no_part_of_a_peer_holds_the_peer(tree: Tree) -> None:
    assert not architecture.parts_that_know_the_whole(tree, "protocol")


def test_shared_fields_are_written_by_their_own_class(tree: Tree) -> None:
    assert not architecture.outside_writers(tree, "protocol", "protocol.context", "ctx", COMPONENTS)


def test_no_command_of_volunteers_leads_to_a_guest(tree: Tree) -> None:
    importers = {name for name, found in tree.imports.items() if any("node.chaos" in each for each in found)}
    assert all(name == "cli.chaos" or name.startswith("node.chaos") for name in importers), importers


def style_findings(*paths: Path) -> str:
    """Output of the style lint, which `make lint` runs on the whole tree."""
    command = [sys.executable, str(REPOSITORY / "tools" / "style_lint.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def missing_from_the_map(tree: Tree, page: str) -> list[str]:
    """Modules that the page of the module map does not list."""
    listed = {name: f"`{name.rpartition('.')[2]}`" for name in tree.modules if name}
    for name in listed:
        if tree.is_package(name):
            listed[name] = f"# {tree.root.name}.{name}\n"
    return [name for name, entry in listed.items() if entry not in page]


def test_every_module_is_in_the_map(tree: Tree) -> None:
    assert not missing_from_the_map(tree, module_map.module_map())


@pytest.mark.parametrize("area", SANS_IO)
def test_decisions_touch_no_world(tree: Tree, area: str) -> None:
    """Drivers own sockets, clocks, random sources, threads, files and tensors."""
    wrong = set()
    for module, source in tree.sources.items():
        if module.split(".")[0] != area:
            continue
        allowed = THIRD_PARTY | SOLVER.get(module, set()) | {"anabranch", "__future__"}
        for node in ast.walk(source):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
                wrong.add(f"{module} uses the random source of numpy")
            for top in (name.split(".")[0] for name in names):
                if top in WORLDLY or (top not in sys.stdlib_module_names and top not in allowed):
                    wrong.add(f"{module} imports {top}")
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "from anabranch.cli.main import main; main(['--help'])",
        "import anabranch.config",
        "import anabranch.observe.events, anabranch.observe.console.step_line",
        "import anabranch.observe.console.progress",
        "import anabranch.checkpoint.directory",
    ],
)
def test_loads_no_torch(code: str) -> None:
    program = f"""
import sys
try:
    {code}
except SystemExit as leaving:
    assert leaving.code in (0, None), leaving.code
heavy = {{"torch", "matplotlib", "transformers", "rich"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# --- each check can fail ---------------------------------------------------------------------------


def small_tree(folder: Path, **files: str) -> Tree:
    """Package `small` with the given files; `a__b` stands for a/b.py, `a` alone for the package a."""
    root = folder / "small"
    for name, text in {"": "", **files}.items():
        path = root.joinpath(*name.split("__")) if name else root
        path = path / "__init__.py" if "__" not in name else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return Tree(root)


LOW = '"""Low layer.\n\nImported by: high.\n"""\n'
HIGH = '"""High layer.\n\nImported by: nothing.\n"""\n'


@pytest.mark.parametrize(
    ("check", "files"),
    [
        (architecture.crowded_folders, {"a": "", **{f"a__m{n}": "" for n in range(16)}}),
        (
            lambda tree: architecture.cycles(tree.imports),
            {
                "a": "",
                "a__x": "if TYPE_CHECKING:\n    from small.a import y",
                "a__y": "from small.a.x import X",
            },
        ),
        (
            lambda tree: architecture.cycles(tree.package_imports),
            {
                **{"a": "", "b": "", "a__x": "from small.b import y", "b__y": ""},
                **{"a__z": "", "b__w": "from small.a import z"},
            },
        ),
        (architecture.undeclared_packages, {"low": '"""Says nothing of it."""'}),
        (architecture.undeclared_packages, {"low": LOW}),
        (
            architecture.forbidden_arrows,
            {"low": LOW, "high": HIGH, "low__x": "from small.high import y", "high__y": ""},
        ),
        (
            lambda tree: architecture.parts_that_know_the_whole(tree, "protocol"),
            {
                "protocol": "",
                "protocol__part": "class Part:\n    def act(self):\n        self.peer.router.go()",
            },
        ),
        *(
            (
                lambda tree: architecture.parts_that_know_the_whole(tree, "protocol"),
                {"protocol": "", "protocol__part": f"class Part:\n    {body}"},
            )
            for body in (
                "def __init__(self, peer):\n        self.peer = peer",
                "def __init__(self, peer: Peer):\n        self._peer = peer",
                "def __init__(self, whole: Peer):\n        self.router, self.whole = whole.router, whole",
                "def __init__(self, whole: Peer | None):\n        self._rest: object = whole",
                "owner: Peer",
            )
        ),
        (
            lambda tree: architecture.outside_writers(tree, "protocol", "protocol.context", "ctx", ["log"]),
            {"protocol": "", "protocol__part": "def act(self):\n    self.ctx.log.term = 3"},
        ),
        (lambda tree: missing_from_the_map(tree, "`known`"), {"a": "", "a__known": "", "a__unknown": ""}),
        (
            lambda tree: style_findings(tree.root),
            {"a": '"""Package."""', "a__x": '"""Module."""\n\n\ndef f():\n    """Of which nobody knows."""'},
        ),
        (
            lambda tree: style_findings(tree.root),
            {"a": '"""Package."""', "a__x": '"""Module."""\n\n\ndef f():\n' + "    pass\n" * 60},
        ),
    ],
)
def test_a_check_refuses_what_it_is_for(
    tmp_path: Path, check: Callable[[Tree], list[str] | str], files: dict[str, str]
) -> None:
    assert check(small_tree(tmp_path, **files))


def test_a_tree_in_order_passes(tmp_path: Path) -> None:
    tree = small_tree(tmp_path, low=LOW, high=HIGH, low__x="", high__y="from small.low import x")
    assert not architecture.cycles(tree.imports) + architecture.forbidden_arrows(tree)
    assert not architecture.undeclared_packages(tree) + architecture.crowded_folders(tree)


def test_a_part_may_hold_the_id_of_a_peer(tmp_path: Path) -> None:
    text = "class Part:\n    peer: str\n    def __init__(self, peer: str):\n        self.peer = peer"
    tree = small_tree(tmp_path, protocol="", protocol__part=text)
    assert not architecture.parts_that_know_the_whole(tree, "protocol")
