"""A small `kubectl`: each pod is a process with its own mounts, network and process ids, on a node of its own.

It does what docs/guides/FLEET.md asks of Kubernetes: jobs, deployments, init containers that are started again until
they succeed, readiness, logs, exec, scale. Images are what is installed here: `relayout`, and for `vllm` a stub,
which loads all ranks as the plugin does and has /health and /metrics. Takes a superuser of Linux.

    PODS=FOLDER python -m support.pods apply -k FOLDER

FOLDER has `volumes/CLAIM` and `nodes`, and keeps what is applied, the logs, and the number of each pod's process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from support.kustomize import render
from support.patience import PATIENCE

STATE = Path(os.environ.get("PODS", "."))
_BACKOFF = 0.2
"""Seconds between two attempts of an init container."""

VLLM = """
import json, logging, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

logging.basicConfig(level="INFO", format="%(message)s")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from relayout.engines.rank_weights import EngineOptions, RankWeights, publish

path, given = sys.argv[2], dict(word.lstrip("-").split("=", 1) for word in sys.argv[3:])
degree = int(given["tensor-parallel-size"])
if given.get("load-format") == "relayout":
    options = EngineOptions.parse(json.loads(given["model-loader-extra-config"]), "the manifest")
    for rank in range(degree):
        delivery = RankWeights(path, rank, degree, options).deliver()
        for _ in delivery:
            pass
        publish(delivery.report(), logging.getLogger("vllm.relayout"))
else:
    logging.info("loaded by vLLM itself")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        registry = CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            MultiProcessCollector(registry)
        body = generate_latest(registry) if self.path == "/metrics" else b""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def install(folder: Path) -> Path:
    """The programs of all images, and `kubectl`, in a folder for PATH."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (folder / "vllm.py").write_text(VLLM)
    tests = Path(__file__).parents[1]
    lines = {
        "relayout": f'exec "{sys.executable}" -m relayout "$@"',
        "vllm": f'exec "{sys.executable}" {folder}/vllm.py "$@"',
        "kubectl": f'PODS={folder} PYTHONPATH={tests} exec "{sys.executable}" -m support.pods "$@"',
    }
    for name, line in lines.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    return programs


def stop_all(folder: Path) -> None:
    """End the pods of this folder; nothing of them stays but files."""
    for pod in (folder / "pods").glob("*"):
        _stop(pod)


def _apply(arguments: argparse.Namespace) -> None:
    if arguments.kustomize:
        objects = render(Path(arguments.kustomize))
    else:
        text = sys.stdin.read() if arguments.filename == "-" else Path(arguments.filename).read_text()
        objects = list(yaml.safe_load_all(text))
    for one in objects:
        kind, name = one["kind"].lower(), one["metadata"]["name"]
        file = STATE / "objects" / f"{kind}-{name}.json"
        file.parent.mkdir(exist_ok=True)
        before = json.loads(file.read_text()) if file.exists() else None
        is_new = before is None or before["spec"]["template"] != one["spec"]["template"]
        if kind == "job" and is_new:
            if before is not None:
                raise SystemExit(f"job/{name}: spec.template: field is immutable")
            _start(f"{name}-0", one["spec"]["template"])
        if kind == "deployment":  # What a file does not say stays as it was set.
            one["spec"].setdefault("replicas", 1 if before is None else before["spec"]["replicas"])
            if before is not None and is_new:
                _reconcile(one | {"spec": one["spec"] | {"replicas": 0}})
            _reconcile(one)
        file.write_text(json.dumps(one))
        print(f"{kind}/{name} applied")


def _reconcile(deployment: dict[str, Any]) -> None:
    """Start or stop pods of a deployment until there are as many as it wants."""
    spec, running = deployment["spec"], _pods(f"deployment/{deployment['metadata']['name']}")
    for pod in running[spec["replicas"] :]:
        _stop(pod)
        shutil.rmtree(pod)
    for number in range(len(running), spec["replicas"]):
        _start(f"{deployment['metadata']['name']}-{number}", spec["template"])


def _start(name: str, template: dict[str, Any]) -> None:
    pod, spec = STATE / "pods" / name, template["spec"]
    pod.mkdir(parents=True)
    (pod / "labels").write_text(json.dumps(template.get("metadata", {}).get("labels", {})))
    (pod / "run.sh").write_text("\n".join(["set -eu", *_root(pod, spec), *_containers(pod, spec)]) + "\n")
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (pod / "log").open("w") as log:
        process = subprocess.Popen(
            [*namespaces, "bash", str(pod / "run.sh")],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    (pod / "pid").write_text(str(process.pid))


def _root(pod: Path, spec: dict[str, Any]) -> list[str]:
    """What makes a root of this machine's folders, in which those of the pod's volumes are too."""
    root = pod / "root"
    lines = [f"mkdir {root}", f"mount -t tmpfs pod {root}", "ip link set lo up"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            lines.append(f"cp -P {entry} {root}{entry}")
        elif entry.is_dir():
            lines.append(f"mkdir {root}{entry}; mount --rbind {entry} {root}{entry}")
    for volume in spec["volumes"]:
        folder = pod / "volumes" / volume["name"]
        if "persistentVolumeClaim" in volume:
            folder = STATE / "volumes" / volume["persistentVolumeClaim"]["claimName"]
        if "configMap" in volume:
            folder = STATE / "volumes" / volume["configMap"]["name"]
        if "hostPath" in volume:
            folder = STATE / "nodes" / f"{pod.name}{volume['hostPath']['path']}"
        folder.mkdir(parents=True, exist_ok=True)
        (place,) = {
            mount["mountPath"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]
            for mount in container["volumeMounts"]
            if mount["name"] == volume["name"]
        }
        lines.append(f"mkdir -p {root}{place}; mount --bind {folder} {root}{place}")
    return lines


def _containers(pod: Path, spec: dict[str, Any]) -> list[str]:
    """What runs the containers, one after the other: init containers until they succeed."""
    first = spec.get("initContainers", [])
    lines = [f"until {_command(pod, container)}; do sleep {_BACKOFF}; done" for container in first]
    (container,) = spec["containers"]
    # A container that is killed is started again, on the volumes that the pod has.
    killed = f"while {_command(pod, container)} && code=0 || code=$?; [ $code -gt 128 ]; do sleep {_BACKOFF}; done"
    return [*lines, killed, f"echo $code > {pod}/code"]


def _command(pod: Path, container: dict[str, Any]) -> str:
    words = [*container.get("command", ["relayout"]), *container["args"]]
    variables = [f"{one['name']}={one['value']}" for one in container.get("env", [])]
    path = f"PATH={STATE / 'bin'}:{os.environ['PATH']}"
    log = pod / f"{container['name']}.log"
    return f"chroot {pod / 'root'} env -i {shlex.join([path, *variables, *words])} >> {log} 2>&1"


def _stop(pod: Path) -> None:
    """End a pod: its first process, with which all others of its process ids end."""
    pid = int((pod / "pid").read_text())
    if _is_alive(pod):
        os.killpg(pid, signal.SIGKILL)
        _until(lambda: not _is_alive(pod), f"the end of {pod.name}")


def _is_alive(pod: Path) -> bool:
    """Whether it is this pod's process that has the number: its command names the pod's script."""
    pid = int((pod / "pid").read_text())
    try:
        return str(pod / "run.sh").encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def _pods(name: str) -> list[Path]:
    """The pods of `job/NAME` or `deployment/NAME`."""
    return sorted((STATE / "pods").glob(f"{name.partition('/')[2]}-[0-9]"))


def _until(is_so: Any, what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.05)


def _wait(arguments: argparse.Namespace) -> None:
    ready = re.fullmatch(r"jsonpath=\{\.status\.readyReplicas\}=(\d+)", getattr(arguments, "for"))
    if ready:
        minutes = re.fullmatch(r"(\d+)([sm])", arguments.timeout)
        patience = int(minutes[1]) * {"s": 1, "m": 60}[minutes[2]]
        # The field is absent at 0: no number is waited for that it has then.
        _until(lambda: 0 < int(ready[1]) == sum(map(_is_ready, _pods(arguments.name))), arguments.name, patience)
        print(f"{arguments.name} condition met")
        return
    [pod] = _pods(arguments.name)
    _until(lambda: (pod / "code").exists(), f"{arguments.name} to complete")
    if (pod / "code").read_text().strip() != "0":
        raise SystemExit(f"{arguments.name} has failed")
    print(f"{arguments.name} condition met")


def _status(arguments: argparse.Namespace) -> None:
    for pod in _pods(arguments.name):
        _until(lambda pod=pod: (pod / "code").exists() or _is_ready(pod), f"{pod.name} to be ready")
        if (pod / "code").exists():
            raise SystemExit(f"{pod.name} has ended")
    print(f"{arguments.name} successfully rolled out")


def _is_ready(pod: Path) -> bool:
    return _is_alive(pod) and _inside(pod, "curl", "-sf", "localhost:8000/health", quiet=True) == 0


def _inside(pod: Path, *words: str, quiet: bool = False) -> int:
    """Run a command in a pod, as `kubectl exec` does; returns its exit code."""
    unshare = int((pod / "pid").read_text())
    children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
    if not children:
        return 1
    enter = ["nsenter", "-t", children[0], "--mount", "--net", "--pid", "chroot", str(pod / "root")]
    path = f"PATH={STATE / 'bin'}:{os.environ['PATH']}"
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run([*enter, "env", "-i", path, *words], stdout=output, stderr=output).returncode


def _exec(arguments: argparse.Namespace) -> None:
    sys.exit(_inside(_pods(arguments.name)[0], *arguments.words))


def _logs(arguments: argparse.Namespace) -> None:
    for log in _pods(arguments.name)[0].glob(f"{arguments.container}.log"):
        print(log.read_text(), end="")


def _scale(arguments: argparse.Namespace) -> None:
    file = STATE / "objects" / f"{arguments.name.replace('/', '-')}.json"
    deployment = json.loads(file.read_text())
    deployment["spec"]["replicas"] = arguments.replicas
    file.write_text(json.dumps(deployment))
    _reconcile(deployment)
    serving = [pod for pod in labelled(STATE, "app", "llama") if _is_ready(pod)]
    with (STATE / "serving").open("a") as numbers:
        numbers.write(f"{len(serving)}\n")


def labelled(folder: Path, name: str, value: str) -> list[Path]:
    """The pods with a label, as a Service selects them."""
    pods = sorted((folder / "pods").glob("*"))
    return [pod for pod in pods if json.loads((pod / "labels").read_text()).get(name) == value]


def _label(arguments: argparse.Namespace) -> None:
    name, _, value = arguments.name.partition("=")
    for pod in labelled(STATE, *arguments.selector.split("=")):
        file = pod / "labels"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        print(f"pod/{pod.name} labeled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, words in (
        (_apply, ("-f", "-k")),
        (_wait, ("--for", "--timeout", "name")),
        (_status, ("status", "name")),
        (_logs, ("name", "-c")),
        (_exec, ("name", "-c")),
        (_scale, ("name", "--replicas")),
        (_label, ("resource", "-l", "name", "--overwrite")),
    ):
        command = commands.add_parser({_status: "rollout"}.get(function, function.__name__[1:]))
        for word in words:
            long = {"-f": ["--filename"], "-k": ["--kustomize"], "-c": ["--container"], "-l": ["--selector"]}.get(
                word, []
            )
            given: dict[str, Any] = {"--replicas": {"type": int}, "--overwrite": {"action": "store_true"}}.get(word, {})
            command.add_argument(word, *long, **given)
        command.set_defaults(do=function)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.words = words[end + 1 :]
    arguments.do(arguments)


if __name__ == "__main__":
    main()
