"""Hook of MkDocs: fills the markers of hand-written pages and adds the pages of the benchmarks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from generate import (
    api_reference,
    cli_reference,
    decision_index,
    message_reference,
    metric_reference,
    module_map,
    recipe_reference,
    results_pages,
    rule_index,
    run_file_reference,
)

#: Name in a marker `<!-- generate: NAME -->` -> generator.
GENERATORS: dict[str, Callable[[], str]] = {
    "commands": cli_reference.commands,
    "decisions": decision_index.index,
    "field types": message_reference.field_types,
    "figures": metric_reference.writers,
    "goal counts": results_pages.counts,
    "message budgets": message_reference.budgets,
    "messages": message_reference.all_messages,
    "metrics": metric_reference.prometheus,
    "modules": module_map.module_map,
    "python": api_reference.functions,
    "protocol version": message_reference.version,
    "recipes": recipe_reference.recipes,
    "results": results_pages.summary,
    "results without goals": results_pages.without_goals,
    "rules": rule_index.index,
    "run file": run_file_reference.keys,
}
MARKER = re.compile(r"^<!-- generate: ([a-z ]+) -->$", flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of benchmarks and decisions to the navigation."""
    for section in config.nav or []:
        if "Results" in section:
            section["Results"] += _by_subject()
        elif "Decisions" in section:
            for record in decision_index.decisions():
                section["Decisions"].append(
                    {f"{record.number} {record.title}": f"decisions/{record.path.name}"}
                )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page for each benchmark."""
    for path, text in results_pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker by what its generator returns."""
    return MARKER.sub(lambda marker: GENERATORS[marker[1]](), markdown)


def _by_subject() -> list[dict[str, Any]]:
    subjects: dict[str, list[dict[str, str]]] = {}
    for result in results_pages.benchmarks():
        entry = {result["title"]: f"results/{result['name']}.md"}
        subjects.setdefault(result["subject"].capitalize(), []).append(entry)
    return [{subject: pages} for subject, pages in subjects.items()]
