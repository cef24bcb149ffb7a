"""The dashboard for Grafana and the alert rules for Prometheus, in examples/monitoring: every metric and label that
they name is one that a server exposes; their own tools accept them; a real Prometheus answers every query."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.serving import CHAT, LONG, Running, running

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD: Any = json.loads((FOLDER / "grafana.json").read_text())

OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""

_METRIC = re.compile(r"wager:[a-z0-9_]+")
_LABELS = re.compile(
    r"(\w+)\s*(?:=~|!~|!=|=)\s*\"|\bby \(([^)]*)\)|{{ ?(?:\$labels\.)?(\w+) ?}}|label_values\(.*, (\w+)\)"
)


def queries() -> Iterator[tuple[str, str]]:
    """Where each query stands, and its text with what it is shown by."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], f"{target['expr']} {target['legendFormat']}"
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in (FOLDER / "alerts.yml").read_text().split("- alert: ")[1:]:
        yield rule.split()[0], rule


def expressions() -> list[str]:
    """The dashboard's queries, as Grafana sends them."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    values = {"$__rate_interval": "10s", "$model": ".*", "$instance": ".*"}
    for name, value in values.items():
        found = [text.replace(name, value) for text in found]
    assert len(found) > 40 and not any("$" in text for text in found)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One whose policy adapts, after some answers, refusals among them."""
    with running({"drafter": "ngram", "depth": None}) as started:
        for number in range(3):
            assert started.post(CHAT, {**LONG, "max_tokens": 60 + number}).status_code == 200
        assert started.post(CHAT, {**LONG, "max_tokens": 0}).status_code == 400
        yield started


def test_every_metric_and_label_is_one_that_a_server_exposes(server: Running) -> None:
    labels: dict[str, set[str]] = {}
    with server.client() as http:
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    seen = set()
    for place, text in queries():
        metrics = _METRIC.findall(text)
        assert metrics, place
        for metric in metrics:
            assert metric in labels, f"{place}: {metric}"
        known = OF_TARGETS.union(*(labels[metric] for metric in metrics))
        named = {name.strip() for groups in _LABELS.findall(text) for group in groups for name in group.split(",")}
        assert named - {""} - {"severity"} <= known, f"{place}: {named - known}"
        seen.update(metrics)
    assert len(seen) > 30 and {"wager:drafter_collapsed", "wager:time_to_first_token_seconds_bucket"} < seen
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) and len(set(ids)) == len(ids), "no panel lies on another one"


# ---- their own tools -------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian has it in the package prometheus)")
    return found


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    promtool = tool("promtool")
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([promtool, "check", "rules", str(tmp_path / "panels.yml")], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    alerts = set(re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text()))
    tested = (FOLDER / "alerts_test.yml").read_text().split("alertname: ")[1:]
    assert alerts == {each.split()[0] for each in tested if "exp_alerts" in each}, "each is seen to fire"


@pytest.mark.slow
def test_a_real_prometheus_answers_every_query(server: Running, tmp_path: Path) -> None:
    prometheus = tool("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{FOLDER / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: wager, static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]}}]\n"
    )
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (
        subprocess.Popen([prometheus, *options], cwd=tmp_path, stderr=subprocess.DEVNULL) as process,
        httpx2.Client(base_url=f"http://{address}/api/v1", timeout=10, verify=False) as http,
    ):
        try:
            empty, end = ["not asked yet"], time.monotonic() + 60
            while empty and time.monotonic() < end:  # rates need two scrapes, and a load between them
                server.post(CHAT, {**LONG, "max_tokens": 60})
                time.sleep(0.5)
                try:
                    results = {text: http.get("/query", params={"query": text}).json() for text in expressions()}
                except (httpx2.TransportError, ValueError):
                    continue  # it does not listen yet, or says in plain words that it is not ready
                assert {each["status"] for each in results.values()} == {"success"}
                empty = [text for text, each in results.items() if not each["data"]["result"]]
                empty = [text for text in empty if not re.search("status=~|preemptions", text)]
            assert not empty
            groups = http.get("/rules").json()["data"]["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
            firing = [alert["labels"]["alertname"] for alert in http.get("/alerts").json()["data"]["alerts"]]
            assert not {"WagerServerGone", "WagerServerErrors", "WagerDrafterFails"} & {*firing}
        finally:
            process.terminate()


@pytest.mark.slow
def test_grafanas_own_schema_has_every_field_of_the_dashboard() -> None:
    """The types that Grafana generates from its schema (PyPI: grafana-foundation-sdk), read and written again."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is missing")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    written = json.loads(JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD)))

    def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            return [found for key in ours for found in lost(ours[key], theirs.get(key), f"{path}/{key}")]
        if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            return [found for at, each in enumerate(ours) for found in lost(each, theirs[at], f"{path}/{at}")]
        return [] if ours == theirs else [path]

    assert not lost(DASHBOARD, written)
