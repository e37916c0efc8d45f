"""Style lint for docstrings, comments and function length.

The rules are those that no general linter has. A docstring or comment names its subject instead of
opening with a relative clause. Every module says what it holds. Public docstrings open with a finished
sentence. Functions stay short.

Usage: python tools/style_lint.py [paths...]    (default: src/anabranch)
Prints one `path:line: message` for each finding and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Lower-case words that open a clause about the subject instead of naming it.
REFUSED_FIRST_WORDS = frozenset({"of", "who", "whose", "whom", "what", "whether", "that", "one"})
REFUSED_OPENINGS = re.compile(r"as it\b", re.IGNORECASE)
#: Longest function in lines, from `def` to the last statement, docstring included.
MOST_FUNCTION_LINES = 60
DEFAULT_PATHS = ("src/anabranch",)

_FIRST_WORD = re.compile(r"[^\w]*([\w-]+)")
_COMMENT_MARKER = re.compile(r"#[:!]?\s*")
_MAYBE_COMMENT = re.compile(r"#[:!]?[^\S\n]*(?=(.*))")
_SENTENCE_END = re.compile(r"""[.?:][)\]`'"*_]*(\s|$)""")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Finding(NamedTuple):
    """Broken rule at a line of a file."""

    line: int
    message: str


def refused_opening(text: str) -> str | None:
    """First words of `text` if the style refuses them, else None."""
    if (opening := REFUSED_OPENINGS.match(text.lstrip())) is not None:
        return opening.group()
    word = _FIRST_WORD.match(text)
    return word.group(1) if word is not None and word.group(1).lower() in REFUSED_FIRST_WORDS else None


def ends_first_sentence(docstring: str) -> bool:
    """True if the first paragraph holds a sentence that ends with `.`, `?` or `:`."""
    first_paragraph = docstring.strip().split("\n\n", 1)[0]
    return _SENTENCE_END.search(first_paragraph) is not None


def check_source(source: str, *, filename: str = "<source>") -> list[Finding]:
    """Findings in one module's source, sorted by line.

    Raises SyntaxError if `source` is not Python.
    """
    tree = ast.parse(source, filename)
    found = [*_module_docstring(tree, filename), *_strings(tree), *_definitions(tree), *_comments(source)]
    return sorted(found)


def _module_docstring(tree: ast.Module, filename: str) -> Iterator[Finding]:
    if not (ast.get_docstring(tree) or "").strip():
        kind = "package" if Path(filename).name == "__init__.py" else "module"
        yield Finding(1, f"{kind} without a docstring")


def _strings(tree: ast.Module) -> Iterator[Finding]:
    """Refused openings of docstrings, those after an attribute included."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if words := refused_opening(text):
                yield Finding(node.lineno, f"docstring begins with {words!r}: name the thing first")


def _definitions(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, Definition):
            continue
        docstring = ast.get_docstring(node)
        if docstring and not node.name.startswith("_") and not ends_first_sentence(docstring):
            message = f"first sentence of {node.name}'s docstring does not end with . ? or :"
            yield Finding(node.body[0].lineno, message)
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if not isinstance(node, ast.ClassDef) and length > MOST_FUNCTION_LINES:
            message = f"function {node.name} has {length} lines, more than {MOST_FUNCTION_LINES}"
            yield Finding(node.lineno, message)


def _comments(source: str) -> Iterator[Finding]:
    """Refused openings of comments. Comment lines below each other at one column are one comment."""
    if not any(refused_opening(text) for text in _MAYBE_COMMENT.findall(source)):
        return  # finding the tokens takes longer than all other checks
    previous = (0, -1)  # line and column of the comment before
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        continues = previous == (line - 1, column)
        previous = (line, column)
        text = token.string[_COMMENT_MARKER.match(token.string).end() :]  # type: ignore[union-attr]
        if not continues and (words := refused_opening(text)) is not None:
            yield Finding(line, f"comment begins with {words!r}: name the thing first")


def python_files(paths: Sequence[str]) -> list[Path]:
    """Files named by `paths` and Python files below the folders among them, sorted.

    Raises FileNotFoundError for a path that does not exist.
    """
    files: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            files.update(path.rglob("*.py"))
        elif path.exists():
            files.add(path)
        else:
            raise FileNotFoundError(path)
    return sorted(files)


def main(arguments: Sequence[str]) -> int:
    """Print the findings in the files that `arguments` name; return the exit status."""
    count = 0
    for path in python_files(arguments or DEFAULT_PATHS):
        for finding in check_source(path.read_text(encoding="utf-8"), filename=str(path)):
            print(f"{path}:{finding.line}: {finding.message}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
