"""Files that operators copy from deploy/: their options and metrics exist, and their templates render correctly."""

import configparser
import json
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from enginewright.cli import main
from enginewright.runtime.config import RuntimeConfig
from tests.helpers.documents import PAGES, ROOT, blocks
from tests.helpers.serving import COMPLETIONS, port_of, process, running, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"


def unit() -> Mapping[str, str]:
    parser = configparser.ConfigParser(strict=False, delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd/enginewright.service")
    assert parser.sections() == ["Unit", "Service", "Install"]
    return parser["Service"]


def render(name: str, **values: Any) -> Any:  # noqa: C901  (a template's forms are read in one place)
    """A template of the chart, for the few forms that ours have."""
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for key, given in values.items():
        known[key] = known[key] | given if isinstance(given, dict) else given

    def value(path: str) -> Any:
        found: Any = known
        for key in path.split("."):
            found = found[key]  # a value that the chart does not have is an error
        return found

    def inline(match: re.Match[str]) -> str:
        text = match[1].strip()
        if text == ".Release.Name":
            return "release"
        if found := re.fullmatch(r"\.Values\.([\w.]+)( \| quote)?", text):
            return json.dumps(str(value(found[1]))) if found[2] else str(value(found[1]))
        if found := re.fullmatch(r"toJson \.Values\.([\w.]+)", text):
            return json.dumps(value(found[1]))
        found = re.fullmatch(r"add \.Values\.([\w.]+) (\d+)", text)
        assert found, text
        return str(value(found[1]) + int(found[2]))

    lines: list[str] = []
    blocks: list[bool] = []
    repeated: list[Any] | None = None
    for line in (CHART / "templates" / name).read_text().splitlines():
        if found := re.fullmatch(r' *\{\{- (if|if not|if eq|if ne|range) \.Values\.([\w.]+)(?: "(\w+)")? \}\}', line):
            kind, given, other = found[1], value(found[2]), found[3]
            repeated = given if kind == "range" else repeated
            assert (other is not None) == (kind in ("if eq", "if ne")), line
            blocks.append((given == other) == (kind == "if eq") if other else bool(given) != (kind == "if not"))
        elif re.fullmatch(r" *\{\{- end \}\}", line):
            blocks.pop()
            repeated = None
        elif all(blocks):
            if repeated is not None:
                lines += [line.replace("{{ . | quote }}", json.dumps(str(item))) for item in repeated]
            else:
                lines.append(re.sub(r"\{\{(.*?)\}\}", inline, line))
    assert not blocks
    return yaml.safe_load("\n".join(lines))


def container(**values: Any) -> Any:
    (found,) = render("deployment.yaml", **values)["spec"]["template"]["spec"]["containers"]
    return found


def steps() -> list[dict[str, Any]]:
    action = yaml.safe_load((DEPLOY / "github/action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    inputs = set(re.findall(r"(?:\$\{\{|if:) inputs\.(\w+)", (DEPLOY / "github/action.yml").read_text()))
    assert inputs == set(action["inputs"])
    found: list[dict[str, Any]] = action["runs"]["steps"]
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of `engine` in deploy/, without the program's name."""
    yield "systemd", shlex.split(unit()["ExecStart"])[1:]
    dockerfile = (DEPLOY / "docker/Dockerfile").read_text()
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)[-1]) == ["engine"]
    yield "docker", json.loads(re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)[-1])
    yield "compose", yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]["engine"]["command"]
    yield "helm", container()["args"]
    for step in steps():
        for line in step.get("run", "").splitlines():
            if line.startswith("engine "):
                words = {"$MODEL": "model", "$QUANT": "w8a8", "$GATE": "full"}
                given = shlex.split(line.split(" > ")[0])[1:]
                yield f"github: {given[0]}", [words.get(word, word) for word in given]


def parse(arguments: list[str]) -> click.Context:
    with click.Context(main, info_name="engine") as context:
        here = [word.replace("/srv/engines", "m").replace("/engines", "m") for word in arguments]  # paths have to exist
        name, command, rest = main.resolve_command(context, here)
        assert command is not None
        return command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("arguments", [pytest.param(words, id=name) for name, words in commands()])
def test_options_exist(arguments: list[str]) -> None:
    parse(arguments)


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.NoSuchOption, match="--no-such-option"):
        parse([*container(extraArgs=["--no-such-option"])["args"]])


def test_all_commands_are_looked_at() -> None:
    assert [name for name, _ in commands()][:4] == ["systemd", "docker", "compose", "helm"]
    assert {words[0] for name, words in commands() if name.startswith("github")} == {
        "build",
        "verify",
        "inspect",
        "rebuild",
        "sign",
    }


def test_servers_may_drain_before_they_are_killed() -> None:
    def drain(arguments: list[str]) -> float:
        return float(parse(arguments).params["drain_seconds"])

    of = dict(commands())
    assert drain(of["systemd"]) < float(unit()["TimeoutStopSec"])
    service = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]["engine"]
    assert drain(of["compose"]) < float(service["stop_grace_period"].removesuffix("s"))
    pod = render("deployment.yaml", drainSeconds=300)["spec"]["template"]["spec"]
    assert drain(pod["containers"][0]["args"]) == 300 < pod["terminationGracePeriodSeconds"]


def test_nothing_runs_as_root() -> None:
    assert re.search(r"^USER 65532:65532$", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert unit()["DynamicUser"] == unit()["NoNewPrivileges"] == "yes" and unit()["CapabilityBoundingSet"] == ""
    pod = render("deployment.yaml")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and container()["securityContext"]["readOnlyRootFilesystem"]


def test_chart() -> None:
    deployment, service = render("deployment.yaml", port=9000), render("service.yaml", port=9000)
    assert deployment["spec"]["replicas"] == 1
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"] == [{"name": "http", "port": 9000, "targetPort": 9000}]
    assert container(port=9000)["ports"] == [{"name": "http", "containerPort": 9000}]
    assert [one["name"] for one in container()["env"]] == ["POD_IP"]
    assert container(apiKeySecret="keys")["env"][1]["valueFrom"]["secretKeyRef"]["name"] == "keys"
    scaled = {"enabled": True, "minReplicas": 2, "maxReplicas": 8, "waitingPerReplica": 4}
    assert render("autoscaler.yaml") is None
    assert render("autoscaler.yaml", autoscaling=scaled)["spec"]["maxReplicas"] == 8
    assert "replicas" not in render("deployment.yaml", autoscaling=scaled)["spec"]


def pod(**values: Any) -> Any:
    return render("deployment.yaml", **values)["spec"]["template"]


def test_pods_are_endpoints_of_an_inference_pool() -> None:
    """The pool selects the pods of all releases that name it, at the port where they answer."""
    assert render("inferencepool.yaml") is None
    named = {"name": "llama", "picker": "picker", "failureMode": "FailOpen"}
    pool = render("inferencepool.yaml", inferencePool=named, port=9000)
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["targetPorts"] == [{"number": 9000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert render("inferencepool.yaml", inferencePool={"name": "llama", "create": False}) is None
    labels = pod(inferencePool=named)["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == "vllm"
    options = parse(container(inferencePool=named, kvEvents={"port": 5557, "model": "llama"})["args"]).params
    assert (options["metrics_compat"], options["kv_events"]) == ("vllm", "tcp://*:5557")
    assert options["kv_events_topic"] == "kv@$(POD_IP):8000@llama"
    assert parse(container()["args"]).params["metrics_compat"] is None


@pytest.mark.parametrize(("role", "label"), [("prefill", "prefill"), ("decode", "decode"), ("both", "prefill-decode")])
def test_pods_have_roles(role: str, label: str) -> None:
    sidecar = "" if role == "prefill" else "sidecar:1"
    values = {"role": role, "secret": "kv", "sidecarImage": sidecar}
    template = pod(kvTransfer=values, port=9000)
    assert template["metadata"]["labels"]["llm-d.ai/role"] == label
    engine = container(kvTransfer=values, port=9000)
    options = parse(engine["args"]).params
    assert (options["kv_role"], options["kv_secret_file"]) == (role, "/secrets/kv.secret")
    assert options["kv_listen"] == (None if role == "decode" else "$(POD_IP):9001")
    listen = options["kv_listen"] and options["kv_listen"].replace("$(POD_IP)", "10.0.0.1")
    RuntimeConfig(kv_role=role, kv_secret_file=options["kv_secret_file"], kv_listen=listen)
    assert engine["volumeMounts"][-1] == {"name": "kv-secret", "mountPath": "/secrets", "readOnly": True}
    assert template["spec"]["volumes"][-1] == {"name": "kv-secret", "secret": {"secretName": "kv"}}
    engine_port = 8200 if sidecar else 9000
    assert options["port"] == engine_port == engine["ports"][0]["containerPort"]
    if not sidecar:
        assert "initContainers" not in template["spec"]
        return
    (found,) = template["spec"]["initContainers"]
    assert found["restartPolicy"] == "Always" and found["ports"] == [{"name": "sidecar", "containerPort": 9000}]
    assert {"--port=9000", "--model-server-port=8200", "--kv-connector=nixlv2"} <= set(found["args"])
    assert found["securityContext"] == engine["securityContext"]


def test_values_of_the_documentation_are_the_charts() -> None:
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    given = [yaml.safe_load(block.text) for page in PAGES for block in blocks(page, "yaml")]
    assert len(given) == 4
    for values in given:
        assert all(set(inner) <= set(known[key]) for key, inner in values.items())
        parse(container(**values)["args"])
        assert pod(**values)["metadata"]["labels"]


def expressions() -> list[str]:
    """PromQL of the dashboard, the alerts, the autoscaler and the documentation."""
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [one["query"] for one in dashboard["templating"]["list"]]
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    found += [rule["expr"] for rule in group["rules"]]
    found += [block.text for page in PAGES for block in blocks(page, "promql")]
    found += re.findall(r"`(\w+\(enginewright_[^`]+)`", (ROOT / "docs/slow.md").read_text())
    return [*found, (CHART / "templates/autoscaler.yaml").read_text()]


@pytest.fixture(scope="module")
def families() -> Mapping[str, Metric]:
    """Metrics of a server with every feature that has metrics of its own, after a request, by the names of samples."""
    with running(limits={"speculate": "ngram"}, api_keys=("a",), tenant_classes=("paid",)) as server:
        key = {"Authorization": "Bearer a"}
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3}, key).status == 200
        server.ask("GET", "/nothing", headers=key)
        wait_until(server.is_idle)
        text = server.ask("GET", "/metrics", headers=key).body.decode()
    return {sample.name: family for family in text_string_to_metric_families(text) for sample in family.samples}


def problems(expression: str, families: Mapping[str, Metric]) -> list[str]:
    """Metrics, labels and slices of an expression that do not exist; `instance` and `job` come from Prometheus."""
    found = []
    known = {"instance", "job"}
    for name, matchers in re.findall(r"\b((?:enginewright|process)_\w+)(?:\{(.*?)\})?", expression):
        if name not in families:
            found.append(name)
            continue
        samples = [one.labels for one in families[name].samples if one.name == name]
        known |= {label for labels in samples for label in labels}
        for label, operator, value in re.findall(r'(\w+)\s*(=~|=|!=)\s*"(.*?)"', matchers):
            there = {labels[label] for labels in samples if label in labels}
            if label not in known or (label in ("slice", "phase", "kind") and "$" not in value and value not in there):
                found.append(f'{name}{{{label}{operator}"{value}"}}')
    grouped = re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", expression)
    return found + [label for names in grouped for label in re.findall(r"\w+", names) if label not in known]


def test_metrics_and_labels_exist(families: Mapping[str, Metric]) -> None:
    assert len(expressions()) > 50
    assert [found for expression in expressions() for found in problems(expression, families)] == []


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("rate(enginewright_tool_call_total[5m])", ["enginewright_tool_call_total"]),
        ("sum by (outcom) (rate(enginewright_tool_calls_total[5m]))", ["outcom"]),
        ('enginewright_sliced_requests_total{slice="tool"}', ['enginewright_sliced_requests_total{slice="tool"}']),
        ('enginewright_tool_calls_total{value="a"}', ['enginewright_tool_calls_total{value="a"}']),
    ],
)
def test_a_wrong_expression_is_found(families: Mapping[str, Metric], expression: str, found: list[str]) -> None:
    assert problems(expression, families) == found


def test_the_dashboard_can_choose_each_slice(families: Mapping[str, Metric]) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    (variable,) = [one for one in dashboard["templating"]["list"] if one["name"] == "slice"]
    there = {one.labels["slice"] for one in families["enginewright_sliced_requests_total"].samples}
    names = variable["query"].split(",")
    assert set(names) == {one["value"] for one in variable["options"]} == there
    assert [one["value"] for one in variable["options"] if one["selected"]] == [variable["current"]["value"]]
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len(set(ids)) == len(ids)


def test_prometheus_reads_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    assert [one["job_name"] for one in config["scrape_configs"]] == ["enginewright"]


def test_systemd_hears_when_it_is_ready_and_when_it_ends(tmp_path: Path) -> None:
    assert unit()["Type"] == "notify"
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(30)
        with process(before=f"import os; os.environ['NOTIFY_SOCKET'] = {os.fspath(address)!r}\n") as opened:
            port_of(opened)
            assert listener.recv(100) == b"READY=1"
            opened.terminate()
            assert listener.recv(100) == b"STOPPING=1"
            assert opened.wait(30) == 0
