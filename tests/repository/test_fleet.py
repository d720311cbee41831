"""docs/guides/FLEET.md, followed from the manifest to the proof and back, on pods that are processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support import pods
from support.patience import PATIENCE
from support.trees import content

from relayout.engines import rank_weights

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
PAGE, EXAMPLES = (ROOT / "docs" / "guides" / "FLEET.md").read_text(), ROOT / "tools" / "examples"
MANIFEST = EXAMPLES / "kubernetes_fleet.yaml"
IMAGES, *STEPS = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def cluster(llama: Path, tmp_path: Path) -> Iterator[Path]:
    """The operator's fleet before: a volume with the model, and a Deployment `llama` with two pods of vLLM alone."""
    if os.getuid() or subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"]).returncode:
        pytest.skip("namespaces take a superuser of Linux")
    pods.install(tmp_path)
    shutil.copytree(llama, tmp_path / "volumes" / "models" / "llama")
    [deployment] = [one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "Deployment"]
    deployment["metadata"]["name"], deployment["spec"]["replicas"] = "llama", 2
    pod = deployment["spec"]["template"]["spec"]
    del pod["initContainers"]
    pod["containers"][0] |= {"args": ["/models/llama", "--tensor-parallel-size=8"], "env": []}
    pod["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": "/models"})
    before = tmp_path / "before.yaml"
    before.write_text(yaml.safe_dump(deployment))
    try:
        assert run(tmp_path, f"kubectl apply -f {before}\nkubectl rollout status deployment/llama").returncode == 0
        yield tmp_path
    finally:
        pods.stop_all(tmp_path)


def run(cluster: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run lines of the page, as somebody in a checkout would."""
    path = f"{cluster / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def running(cluster: Path) -> list[str]:
    return sorted(path.name for path in (cluster / "pods").glob("llama*") if "convert" not in path.name)


def test_the_page_is_followed_from_the_manifest_to_the_proof_and_back(cluster: Path) -> None:
    start, look, prove, all_pods, back = STEPS
    source = content(cluster / "volumes" / "models" / "llama")

    done = run(cluster, start)
    assert done.returncode == 0, done.stderr
    assert "every slice compared with the source" in done.stdout
    assert running(cluster) == ["llama-0", "llama-1", "llama-relayout-0"]

    done = run(cluster, look)
    assert done.returncode == 0, done.stderr
    ranks = re.findall(r"^relayout: rank (\d) of 8: .*, 0 whole tensors read", done.stdout, re.MULTILINE)
    assert ranks == list("01234567")
    assert re.findall(r"^relayout_loads_total{.*} (.*)$", done.stdout, re.MULTILINE) == ["8.0"]
    done = run(cluster, look.replace("deployment/llama-relayout", "deployment/llama"))
    assert done.returncode == 1  # What vLLM loads itself has no such line, and counts nothing.

    done = run(cluster, prove)
    assert done.returncode == 0, done.stderr
    assert re.search(r"verified \d+ slices of 8 ranks", done.stdout)

    done = run(cluster, all_pods)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == [f"llama-relayout-{number}" for number in range(3)]
    copies = list((cluster / "nodes").glob("llama-relayout-*/nvme/relayout/llama-tp8"))
    assert [content(copy) for copy in copies] == [content(cluster / "volumes" / "models" / "llama-tp8")] * 3

    done = run(cluster, back)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-0", "llama-1"]
    assert content(cluster / "volumes" / "models" / "llama") == source


def test_a_pod_whose_copy_is_damaged_does_not_serve_and_its_log_names_the_file(cluster: Path) -> None:
    assert run(cluster, STEPS[0]).returncode == 0
    [copy] = (cluster / "nodes").glob("*/nvme/relayout/llama-tp8")
    file = next(copy.glob("model-rank-3-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = "kubectl scale deployment/llama-relayout --replicas 0; kubectl scale deployment/llama-relayout --replicas 1"
    assert run(cluster, again).returncode == 0
    done = run(cluster, "kubectl rollout status deployment/llama-relayout")
    assert done.returncode == 1
    done = run(
        cluster, "kubectl logs deployment/llama-relayout -c copy; kubectl logs deployment/llama-relayout -c vllm"
    )
    assert "already there" in done.stdout
    assert re.search(rf"FormatError: .*{file.name}", done.stdout)


def test_rules_and_dashboard_ask_for_what_loads_count() -> None:
    counted = {f"{counter._name}_total" for counter in rank_weights._counters()}
    rules = yaml.safe_load((EXAMPLES / "prometheus_rules.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [one["expr"] for panel in panels for one in panel["targets"]]
    assert len(asked) == 6
    assert set(re.findall(r"relayout_\w+", " ".join(asked))) == counted
    assert set(re.findall(r"^\| `(relayout_\w+)`", PAGE, re.MULTILINE)) == counted


def test_the_manifest_runs_the_images_of_the_page_as_their_user() -> None:
    dockerfile = (ROOT / ".github" / "container" / "Dockerfile").read_text()
    job, deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    specs = [one["spec"]["template"]["spec"] for one in (job, deployment)]
    containers = [one for spec in specs for one in (*spec["initContainers"], *spec["containers"])]
    assert {one["image"] for one in containers} == set(re.findall(r"-t (\S+)", IMAGES))
    assert {spec["securityContext"]["runAsUser"] for spec in specs} == {2001}
    assert dockerfile.count("USER 2001") == 2
    assert {
        name: deployment["spec"]["template"]["metadata"]["labels"][name] for name in service["spec"]["selector"]
    } == (service["spec"]["selector"])
