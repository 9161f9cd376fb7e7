"""examples/deploy and docs/DEPLOYMENT.md: the files are what they claim to be, and every option in them exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from procengine.api.all_routes import all_routes
from procengine.cli.completion_tree import nodes_of, read_tree
from procengine.cli.main import whole_parser
from procengine.engine_args import check_ranges
from procengine.option_sources import engine_args_of, layer, read_config_file, unknown_variables

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
FLAGS = {name for node in nodes_of(read_tree(whole_parser())) for flag in node.flags for name in flag.names}
OF_OTHERS = {"--init", "--time", "--system", "--now", "--index-url"}  # docker, systemctl, useradd, pip


def environment_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def kubernetes() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def check_config(path: Path) -> dict[str, Any]:
    values = read_config_file(path)
    check_ranges(engine_args_of(layer({}, path, {})))
    return values


def test_config_file_holds_options_in_their_ranges() -> None:
    assert check_config(DEPLOY / "procengine.toml")["port"] == 8000


def test_variables_are_options_or_places() -> None:
    variables = environment_file(DEPLOY / "procengine.env")
    assert unknown_variables(variables) == []
    layer({}, None, variables)


def directives(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_unit_starts_a_right_command_and_waits_longer_than_the_drain() -> None:
    unit = directives(DEPLOY / "procengine.service")
    _, *arguments = shlex.split(unit["ExecStart"])
    args = whole_parser().parse_args(arguments)
    assert args.config_file.name == "procengine.toml"
    assert unit["KillMode"] == "mixed"
    drain_s = read_config_file(DEPLOY / "procengine.toml")["drain_timeout"]
    assert int(unit["TimeoutStopSec"]) >= drain_s + 15


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "procengine.service").read_text()
    mine = re.sub(r"^(User|Group|EnvironmentFile)=.*\n", "", text, flags=re.M)  # of a machine that has them
    path = tmp_path / "procengine.service"
    path.write_text(mine.replace("/opt/procengine/bin/procengine", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "procengine.service" in line]
    assert ours == []


def test_container_runs_right_commands_as_a_user() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    commands = dict(re.findall(r"^(?:HEALTHCHECK .*)?(CMD|ENTRYPOINT) (\[.*\])$", text, flags=re.M))
    entry, default = json.loads(commands["ENTRYPOINT"]), json.loads(commands["CMD"])
    whole_parser().parse_args([*entry[1:], *default])
    health = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, flags=re.M)[0])
    whole_parser().parse_args(health[1:])
    variables = dict(re.findall(r"(PROCENGINE_\w+)=(\S+)", text))
    assert unknown_variables(variables) == []
    assert re.search(r"^USER procengine$", text, flags=re.M)


def test_pod_runs_right_commands_with_a_right_file(tmp_path: Path) -> None:
    parts = kubernetes()
    path = tmp_path / "procengine.toml"
    path.write_text(parts["ConfigMap"]["data"]["procengine.toml"])
    values = check_config(path)
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,), (pull,) = pod["containers"], pod["initContainers"]
    assert container["args"] == ["--config", "/etc/procengine/procengine.toml"]
    whole_parser().parse_args(pull["command"][1:])
    assert pull["command"][-1] == values["model"]
    assert unknown_variables({one["name"]: "x" for one in container["env"]}) == []
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": values["port"], "metrics": values["metrics_port"]}


def test_probes_ask_routes_that_want_no_key_and_give_time_to_start_and_to_end() -> None:
    parts = kubernetes()
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    public = {route.path for route in all_routes().routes if route.is_public}
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["path"] for probe in probes} <= public
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    config = parts["ConfigMap"]["data"]["procengine.toml"]
    times = dict(re.findall(r"^(\w+_timeout) = (\d+)$", config, flags=re.M))
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= int(times["start_timeout"])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= waits + int(times["drain_timeout"]) + 15
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize(
    "path", [ROOT / "docs" / "DEPLOYMENT.md", ROOT / "README.md", *sorted(DEPLOY.iterdir())], ids=lambda path: path.name
)
def test_every_flag_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text()))
    if path.name in ("Containerfile", "kubernetes.yaml"):
        named -= set(re.findall(r"--[a-z-]+", " ".join(path.read_text().splitlines()[:5])))
        named = {flag for flag in named if flag.removeprefix("--") not in {"no-cache-dir", "no-install-recommends"}}
        named -= {"--from", "--uid", "--create-home", "--interval", "--timeout", "--start-period", "--time"}
    assert named - OF_OTHERS <= FLAGS


@pytest.mark.parametrize("name", ["README.md", "docs/DEPLOYMENT.md", "docs/MIGRATING_FROM_VLLM.md", "docs/HTTP.md"])
def test_every_command_line_of_a_document_is_right(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("procengine ")]
    assert lines
    parser = whole_parser()
    for line in lines:
        for command in line.split("#")[0].split(" > ")[0].rstrip(" &\\").split(" && "):
            parser.parse_args(shlex.split(command)[1:])
