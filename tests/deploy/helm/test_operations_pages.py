"""The page that tells how to install, and the other pages for operators: their commands, values, Secrets and names are the chart's."""

from __future__ import annotations

import re

import helm_python
import yaml

from tests.deploy.helm.rendered_chart import CHART, MINIMAL, NAMESPACE, ROOT, merged, values
from tests.docs.pages import OPERATIONS, blocks, commands

PAGE = ROOT / "docs" / "operations" / "install-on-kubernetes.md"
EVERY_COMMAND = [c.text for page in OPERATIONS for block in blocks(page) if block.language == "bash" for c in commands(block)]
COMMANDS = [command.text for block in blocks(PAGE) if block.language == "bash" for command in commands(block)]


def test_it_takes_ten_commands() -> None:
    first = next(block for block in blocks(PAGE) if block.language == "bash")
    assert len(list(commands(first))) == 10


def test_the_example_of_values_fits_the_chart() -> None:
    (example,) = (block.text for block in blocks(PAGE) if block.language == "yaml")
    text = re.sub(r"<[^>]+>", "0" * 64, example)
    chart = helm_python.Chart.load(CHART)
    chart.validate_schema(merged(values(MINIMAL), yaml.safe_load(text)))


def test_the_values_of_the_page_about_scaling_fit_the_chart() -> None:
    (example,) = (block.text for block in blocks(ROOT / "docs/operations/scaling.md") if block.language == "yaml")
    helm_python.Chart.load(CHART).validate_schema(merged(values(MINIMAL), yaml.safe_load(example)))


def test_the_secrets_of_the_commands_are_the_defaults() -> None:
    defaults = helm_python.Chart.load(CHART).values
    created = {words[4] for words in map(str.split, COMMANDS) if words[1:4] == ["create", "secret", "generic"]}
    assert created == {defaults["database"]["secret"], defaults["database"]["ownerSecret"], defaults["keys"]["secret"]}
    table = PAGE.read_text()
    assert all(f"| `{name}` |" in table for name in {*created, defaults["inference"]["secret"]})


def test_every_value_that_it_names_exists() -> None:
    text = "\n".join(page.read_text() for page in OPERATIONS)
    named = {m[1] for m in re.finditer(r"`((?:[a-z]+[A-Z]?[a-z]*\.)+[a-zA-Z]+)`", text)}
    named = {
        name
        for name in named
        if not name.endswith(
            (".yaml", ".key", ".sh", ".json", ".jsonl", ".env", ".toml", ".sql", ".dump", ".token", ".created", ".updated")
        )
    }
    assert {"kueue.schedule", "database.prepareDagster", "objectStore.secret", "dagsterDaemon.resources"} <= named
    for path in named:
        found = helm_python.Chart.load(CHART).values
        for part in path.split("."):
            assert part in found, path
            found = found[part]


def test_the_objects_that_commands_name_are_rendered() -> None:
    files = helm_python.Chart.load(CHART).render(values(MINIMAL), name="ft-platform", namespace=NAMESPACE)
    made = [m for file, text in files.items() if file.endswith(".yaml") for m in yaml.safe_load_all(text) if m]
    names = {(m["kind"], m["metadata"]["name"]) for m in made}
    text = "\n".join(EVERY_COMMAND)
    told = {("Deployment", name) for name in re.findall(r"\bdeploy/(ft-platform-[a-z-]+)", text)}
    told |= {("CronJob", name) for name in re.findall(r"cronjob/([a-z-]+)", text)}
    for account in re.findall(r"--as system:serviceaccount:ft-platform:([a-z-]+)", text):
        told |= {("ServiceAccount", account), ("ClusterRole", account)}
    assert {kind for kind, _ in told} == {"Deployment", "CronJob", "ServiceAccount", "ClusterRole"}
    assert told <= names
    table = re.findall(r"\| `(ft-platform-[a-z]+)` \|", PAGE.read_text())
    assert len(table) == 6
    assert {("ServiceAccount", n) for n in table} <= names
