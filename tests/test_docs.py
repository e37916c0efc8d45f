"""The documentation keeps up with the code: version, messages, packages, paths, commands, results."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from anabranch import PROTOCOL_VERSION
from anabranch.cli.main import build_parser
from anabranch.net.handshake import WIRE_VERSION
from anabranch.observe.metrics.prometheus import METRICS
from anabranch.observe.metrics.writers import EXPORTED
from anabranch.protocol.messages.table import ROWS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from generate import decision_index, escaped, hooks, module_map, results_pages, rule_index  # noqa: E402

PAGES = sorted(DOCS.rglob("*.md"))
#: A path of the package, of the tests or of the benchmarks that a page names in code style.
PATH = re.compile(
    r"`((?:src/anabranch|tests|benchmarks|docs|cli|flow|protocol|train|data|net|node|sim|checkpoint|audit|observe)/[\w./-]*)`"
)
#: Pages whose paths are those of another time, or of a run directory.
HISTORY = {"decisions", "lab"}


def text(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def section(page: str, heading: str) -> str:
    """Text of one section of the second level."""
    return text(page).split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table_cells(words: str) -> list[str]:
    """First cells of all table rows, without the heads."""
    cells = re.findall(r"^\| ([^|]+) \|", words, flags=re.MULTILINE)
    return [cell for cell in cells if not set(cell) <= set("- ")]


# ---- versions, messages, packages -------------------------------------------------------------------


def test_the_protocol_page_has_the_version_of_the_code() -> None:
    versions = re.findall(r"^\| (\d+) \|", text("reference/protocol.md"), flags=re.MULTILINE)
    assert int(versions[0]) == PROTOCOL_VERSION == max(map(int, versions))
    assert f"the version of the *wire*, which is {WIRE_VERSION}:" in text("reference/protocol.md")


def test_the_protocol_page_lists_every_message_and_no_other() -> None:
    named = [
        name
        for cell in table_cells(section("reference/protocol.md", "Messages"))
        for name in cell.split(", ")
    ]
    listed = [name.strip("`") for name in named if name != "message"]
    assert sorted(listed) == sorted(row.type.__name__ for row in ROWS)


def test_the_architecture_page_lists_every_package_and_no_other() -> None:
    listed = {
        cell.strip("`").rstrip("/")
        for cell in table_cells(section("explanation/architecture.md", "Packages"))
    }
    folders = {str(path.relative_to(module_map.PACKAGE)) for path in module_map.packages()}
    outer = {name for name in folders if "/" not in name and name != "."}
    inner = {name for name in folders if name.startswith("protocol/") and name.count("/") == 1}
    assert listed - {"package"} == outer | inner


def test_the_module_map_has_every_module_with_its_subject() -> None:
    made = module_map.module_map()
    for folder in module_map.packages():
        for module in module_map.modules(folder):
            assert module_map.summary(module), f"{module} has no docstring"
            assert f"| `{module.stem}` |" in made


# ---- paths, links, commands -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.relative_to(DOCS).parts[0] not in HISTORY], ids=str
)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text("utf-8")):
        assert (ROOT / path).exists() or (ROOT / "src" / "anabranch" / path).exists(), f"{page}: {path}"


def test_pages_that_the_code_names_exist() -> None:
    for folder in ("tests",):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w./-]+\.(?:md|json)\b", path.read_text("utf-8")):
                assert (ROOT / name).exists(), f"{path}: {name}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES:
        name = str(page.relative_to(DOCS))
        assert name in navigation or name.startswith("decisions/0"), f"{name} is not in mkdocs.yml"


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(
            r"^```bash\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
        ):
            for line in block.splitlines():
                words = re.sub(r"^(?:sudo )?(?:[A-Z]+=\S+ )?(?:\.venv/bin/)?", "", line)
                if words.startswith("anabranch "):
                    found.append((str(page.relative_to(DOCS)), words.removeprefix("anabranch ")))
    return found


@pytest.mark.parametrize("page, command", commands())
def test_a_command_of_a_page_is_understood(page: str, command: str) -> None:
    arguments = shlex.split(command, comments=True)
    assert build_parser(arguments).parse_args(arguments).command == arguments[0]


# ---- generated pages --------------------------------------------------------------------------------


def test_every_marker_has_a_generator_and_every_generator_a_marker() -> None:
    markers = {name for page in PAGES for name in hooks.MARKER.findall(page.read_text("utf-8"))}
    assert markers == set(hooks.GENERATORS)
    for name, generator in hooks.GENERATORS.items():
        assert generator().strip(), name


def test_every_figure_of_the_page_and_the_writers_is_listed() -> None:
    for name, (kind, words) in METRICS.items():
        assert f"| `{name}` | {kind} | {escaped(words)} |" in hooks.GENERATORS["metrics"]()
    for name, words in EXPORTED.items():
        assert f"| `{name}` | {escaped(words)} |" in hooks.GENERATORS["figures"]()


def test_results_have_the_agreed_keys() -> None:
    assert len(results_pages.benchmarks()) >= 30  # raises ValueError for a file of another form


def test_decisions_have_one_form_and_consecutive_numbers() -> None:
    numbers = [int(record.number) for record in decision_index.decisions()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_invariant_and_rule_is_defined_and_named_by_a_test() -> None:
    rules = rule_index.rules()
    assert list(rules) == [f"I{n}" for n in range(1, 8)] + [f"R{n}" for n in range(1, 15)]
    named = rule_index.cited(ROOT / "tests")
    assert [rule for rule in rules if rule not in named] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 120


def soak_by_name(path: Path) -> dict[str, bool]:
    """Tests of a file, and whether only `make soak` runs them."""
    tree = ast.parse(path.read_text("utf-8"))
    marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    whole = any(mark.startswith("pytestmark") and "mark.soak" in mark for mark in marks)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    soak = ("pytest.mark.soak", "pytest.mark.soak()")
    return {
        node.name: whole or any(ast.unparse(one) in soak for one in node.decorator_list) for node in tests
    }


def test_each_row_of_a_newcomer_s_table_names_tests_that_are_there() -> None:
    page = text("explanation/coming-from.md")
    rows = re.findall(r"^\| .* \|$", page.split("\n## ", 1)[0], flags=re.MULTILINE)[1:]
    assert len(rows) > 30
    for row in rows:
        held = row.split(" | ")[-1]
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`( \(soak\))?", held)
        assert named or held == "– |", row
        for path, test, soak in named:
            assert soak_by_name(ROOT / path).get(test) is bool(soak), f"{path}::{test}"


def test_the_installation_guide_lists_every_extra() -> None:
    """An extra of pyproject.toml is listed, but for those of developers."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    table = project.split("[project.optional-dependencies]\n", 1)[1].split("\n[", 1)[0]
    extras = set(re.findall(r"^(\w+) = ", table, flags=re.MULTILINE)) - {"dev", "docs"}
    assert set(re.findall(r"`anabranch\[(\w+)\]`", text("how-to/install.md"))) == extras
