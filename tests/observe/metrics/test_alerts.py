"""Alerting rules: of the form that Prometheus reads, on metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from anabranch.observe.metrics.prometheus import METRICS

RULES = Path(__file__).resolve().parents[3] / "docs" / "examples" / "alerts.yaml"
#: Keys of a rule, by https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/.
KEYS = {"alert", "expr", "for", "labels", "annotations"}


def test_alerts_watch_metrics_that_exist() -> None:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6
    for rule in rules:
        assert rule.keys() <= KEYS and {"alert", "expr", "labels", "annotations"} <= rule.keys()
        named = set(re.findall(r"anabranch_\w+", rule["expr"]))
        assert named and named <= METRICS.keys(), named - METRICS.keys()
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")
