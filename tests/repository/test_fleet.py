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
from support.kustomize import render
from support.patience import PATIENCE
from support.trees import content

import relayout
from relayout.engines import rank_weights

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
PAGE, EXAMPLES = (ROOT / "docs" / "guides" / "FLEET.md").read_text(), ROOT / "tools" / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
MANIFEST, JOB = KUBERNETES / "fleet" / "deployment.yaml", KUBERNETES / "convert" / "job.yaml"
JOBS = KUBERNETES / "convert-many" / "jobs.yaml"
TRUST = KUBERNETES / "trust" / "trust.yaml"
IMAGES, *STEPS = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def cluster(llama: Path, tmp_path: Path) -> Iterator[Path]:
    """The operator's fleet before: a volume with the model, and a Deployment `llama` with two pods of vLLM alone."""
    if os.getuid() or subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"]).returncode:
        pytest.skip("namespaces take a superuser of Linux")
    pods.install(tmp_path)
    shutil.copytree(llama, tmp_path / "volumes" / "models" / "llama")
    deployment = yaml.safe_load(MANIFEST.read_text())
    deployment["metadata"]["name"], deployment["spec"]["replicas"] = "llama", 2
    pod = deployment["spec"]["template"]["spec"]
    del pod["initContainers"]
    pod["containers"][0] |= {"args": ["/models/llama", "--tensor-parallel-size=8"], "env": []}
    pod["containers"][0]["command"] = ["vllm", "serve"]
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


def behind_the_service(cluster: Path) -> list[str]:
    return [pod.name for pod in pods.labelled(cluster, "app", "llama")]


def test_the_page_is_followed_from_the_manifest_to_the_proof_and_back(cluster: Path) -> None:
    start, look, prove, requests, all_pods, back, *_ = STEPS
    source = content(cluster / "volumes" / "models" / "llama")

    done = run(cluster, start)
    assert done.returncode == 0, done.stderr
    assert "every slice compared with the source" in done.stdout
    assert running(cluster) == ["llama-0", "llama-1", "llama-canary-0"]

    done = run(cluster, look)
    assert done.returncode == 0, done.stderr
    ranks = re.findall(r"^relayout: rank (\d) of 8: .*, 0 whole tensors read", done.stdout, re.MULTILINE)
    assert ranks == list("01234567")
    assert loads(done.stdout) == ["8.0"]
    done = run(cluster, look.replace("deployment/llama-canary", "deployment/llama"))
    assert done.returncode == 1  # What vLLM loads itself has no such line, and counts nothing.

    done = run(cluster, prove)
    assert done.returncode == 0, done.stderr
    assert re.search(r"verified \d+ slices of 8 ranks", done.stdout)

    assert behind_the_service(cluster) == ["llama-0", "llama-1"]
    done = run(cluster, requests)
    assert done.returncode == 0, done.stderr
    assert behind_the_service(cluster) == ["llama-0", "llama-1", "llama-canary-0"]

    done = run(cluster, all_pods)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-canary-0", "llama-relayout-0", "llama-relayout-1"]
    copies = list((cluster / "nodes").glob("llama-*/nvme/relayout/llama-tp8"))
    assert [content(copy) for copy in copies] == [content(cluster / "volumes" / "models" / "llama-tp8")] * 3

    done = run(cluster, back)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-0", "llama-1"]
    assert content(cluster / "volumes" / "models" / "llama") == source


def test_back_and_forth_again_never_leaves_no_pod_that_serves(cluster: Path) -> None:
    start, _, _, _, all_pods, back, *_ = STEPS
    done = run(cluster, start + (all_pods + back) * 2)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-0", "llama-1"]
    done = run(cluster, start)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-0", "llama-1", "llama-canary-0"]

    # Without the number of pods, which applying does not set: what serves is left as it is.
    scale = "kubectl scale deployment/llama-relayout --replicas 1\n"
    assert scale in all_pods
    done = run(cluster, "set +e\n" + all_pods.replace(scale, "").replace("--timeout=1m", "--timeout=1s"))
    assert "waited in vain" in done.stderr
    assert running(cluster) == ["llama-0", "llama-canary-0"]
    assert all(int(number) for number in (cluster / "serving").read_text().split())


def loads(text: str) -> list[str]:
    return re.findall(r"^relayout_loads_total{.*} (.*)$", text, re.MULTILINE)


def test_new_weights_go_to_the_canary_and_then_to_as_many_pods_as_there_were(cluster: Path) -> None:
    start, look, _, _, all_pods, _, new, follow, previous = STEPS
    assert run(cluster, start + all_pods).returncode == 0
    models = cluster / "volumes" / "models"
    shutil.copytree(models / "llama", models / "llama-2")
    done = run(cluster, new + follow)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-canary-0", "llama-relayout-0", "llama-relayout-1"]
    for copy in (cluster / "nodes").glob("llama-[cr]*/nvme/relayout"):
        assert sorted(path.name for path in copy.iterdir()) == ["llama-2-tp8", "llama-tp8"]
    done = run(cluster, look)
    assert loads(done.stdout) == ["8.0"], done.stderr
    assert behind_the_service(cluster) == ["llama-relayout-0", "llama-relayout-1"]

    done = run(cluster, previous)
    assert done.returncode == 0, done.stderr
    assert running(cluster) == ["llama-relayout-0", "llama-relayout-1"]
    done = run(cluster, "for name in copy vllm; do kubectl logs deployment/llama-relayout -c $name; done")
    assert "already there" in done.stdout
    assert "llama-2" not in done.stdout
    # Applying again changes nothing; the Job of a folder cannot be changed.
    assert run(cluster, f"kubectl apply -f {JOB}").returncode == 0
    assert "field is immutable" in run(cluster, f"sed s/2Gi/4Gi/ {JOB} | kubectl apply -f -").stderr


def test_a_container_that_is_killed_counts_from_zero(cluster: Path) -> None:
    start, look, *_ = STEPS
    assert run(cluster, start).returncode == 0
    kill = "kubectl exec deployment/llama-canary -c vllm -- pkill -9 -f vllm.py"
    assert run(cluster, kill).returncode == 0
    done = run(cluster, "sleep 1; kubectl rollout status deployment/llama-canary\n" + look)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^relayout: rank 0 of 8", done.stdout, re.MULTILINE)) == 2
    assert loads(done.stdout) == ["8.0"]


def test_a_pod_whose_copy_is_damaged_does_not_serve_and_its_log_names_the_file(cluster: Path) -> None:
    assert run(cluster, STEPS[0]).returncode == 0
    [copy] = (cluster / "nodes").glob("*/nvme/relayout/llama-tp8")
    file = next(copy.glob("model-rank-3-*.safetensors"))
    whole = file.read_bytes()
    again = "kubectl scale deployment/llama-canary --replicas 0; kubectl scale deployment/llama-canary --replicas 1"
    status = "kubectl rollout status deployment/llama-canary"

    file.write_bytes(whole[:-100])  # Too short: the next pod replaces it.
    done = run(cluster, f"{again}; {status}")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == whole

    (copy / "relayout.json").rename(copy / "kept.json")  # Nothing proves what the folder is: it stays.
    assert run(cluster, again).returncode == 0
    says = "until kubectl logs deployment/llama-canary -c copy | grep '{}'; do sleep 0.2; done"
    assert run(cluster, says.format("not an output of relayout")).returncode == 0
    (copy / "kept.json").rename(copy / "relayout.json")
    (copy / "notes").touch()
    file.write_bytes(whole[:-100])
    assert run(cluster, again).returncode == 0
    assert run(cluster, says.format("holds files that relayout did not write")).returncode == 0
    (copy / "notes").unlink()
    done = run(cluster, f"{again}; {status}")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == whole

    content = bytearray(whole)
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(cluster, again).returncode == 0
    assert run(cluster, status).returncode == 1
    done = run(cluster, "kubectl logs deployment/llama-canary -c copy; kubectl logs deployment/llama-canary -c vllm")
    assert "already there" in done.stdout
    assert re.search(rf"FormatError: .*{file.name}", done.stdout)

    shutil.rmtree(copy)  # As the page says.
    done = run(cluster, f"{again}; {status}")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == whole


def test_a_fleet_with_a_policy_serves_what_is_signed_and_nothing_else(cluster: Path) -> None:
    pytest.importorskip("model_signing")
    from support.signing import make_keys

    deployment, patch = yaml.safe_load(MANIFEST.read_text()), yaml.safe_load(TRUST.read_text())
    pod, more = deployment["spec"]["template"]["spec"], patch["spec"]["template"]["spec"]
    for part in ("initContainers", "containers"):
        ((container,), (added,)) = pod[part], more[part]
        assert container["name"] == added["name"]
        for name in ("env", "volumeMounts"):
            container[name] = container.get(name, []) + added[name]
    pod["volumes"] += more["volumes"]
    manifest = cluster / "trusting.yaml"
    manifest.write_text(yaml.safe_dump(deployment))
    trust = cluster / "volumes" / "relayout-trust"
    trust.mkdir()
    keys, stranger = (make_keys(cluster, name) for name in ("release", "stranger"))
    shutil.copy(keys.policy, trust / "trusted.toml")
    shutil.copy(keys.public, trust)

    convert = STEPS[0].partition("kubectl apply -k tools/examples/kubernetes/canary")[0]
    assert run(cluster, convert).returncode == 0
    relayout.sign(cluster / "volumes" / "models" / "llama-tp8", key=keys.key)
    status = "kubectl rollout status deployment/llama-relayout"
    done = run(cluster, f"kubectl apply -f {manifest}; {status}")
    assert done.returncode == 0, done.stderr

    relayout.sign(cluster / "volumes" / "models" / "llama-tp8", key=stranger.key)
    again = "kubectl scale deployment/llama-relayout --replicas 0; kubectl scale deployment/llama-relayout --replicas 1"
    assert run(cluster, again).returncode == 0
    refused = "until kubectl logs deployment/llama-relayout -c copy | grep model.sig; do sleep 0.2; done"
    done = run(cluster, refused)
    assert done.returncode == 0, done.stderr
    assert "done" not in run(cluster, "kubectl logs deployment/llama-relayout -c copy").stdout
    assert (cluster / "serving").read_text().split()[-1] == "2"  # Those of vLLM alone.


def test_rules_and_dashboard_ask_for_what_loads_count() -> None:
    counted = {f"{counter._name}_total" for counter in rank_weights._counters()}
    rules = yaml.safe_load((EXAMPLES / "prometheus_rules.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())["panels"]
    shown = [one["expr"] for panel in panels for one in panel["targets"]]
    assert all(len(re.findall(r"relayout_\w+", one)) == one.count('{namespace=~"$namespace"}') for one in shown), shown
    asked = [rule["expr"] for rule in rules] + shown
    assert len(asked) == 8
    assert set(re.findall(r"relayout_\w+", " ".join(asked))) == counted
    assert set(re.findall(r"^\| `(relayout_\w+)`", PAGE, re.MULTILINE)) == counted


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_on_what_they_name_and_compare_pods_of_one_model_alone(tmp_path: Path) -> None:
    def pod(name: str, seconds: int, loads: int = 8, namespace: str = "a", label: str = "pod") -> list[dict[str, str]]:
        labels = f'namespace="{namespace}", {label}="{name}"'
        counted = f'{{{labels}, backend="read", cache="none"}}'
        return [
            {"series": f"up{{{labels}}}", "values": "1x30"},
            *(
                {"series": f"{what}{counted}", "values": f"{value}x30"}
                for what, value in (("relayout_loads_total", loads), ("relayout_load_seconds_total", seconds * loads))
                if loads
            ),
        ]

    fleet = [one for number in range(4) for one in pod(f"llama-relayout-5d-{number}", 10)]
    large = [one for number in range(2) for one in pod(f"mixtral-relayout-5d-{number}", 100)]
    elsewhere = [one for number in range(4) for one in pod(f"llama-relayout-77-{number}", 90, namespace="b")]
    slow, unused = pod("llama-canary-5d-0", 31), pod("llama-relayout-5d-9", 0, loads=0)
    cases: list[tuple[list[dict[str, str]], dict[str, list[str]]]] = [
        (fleet + large + elsewhere, {}),
        (fleet + large + slow, {"RelayoutSlowLoad": ["llama-canary-5d-0"]}),
        (fleet + pod("llama-relayout-5d-9", 10, loads=7), {"RelayoutNotUsed": ["llama-relayout-5d-9"]}),
        (fleet + unused + pod("llama-relayout-5d-9", 10, namespace="b"), {"RelayoutNotUsed": ["llama-relayout-5d-9"]}),
        (large, {"RelayoutPodsNotSeen": [""]}),
        (pod("llama-relayout-5d-0", 10, loads=0, label="kubernetes_pod_name"), {"RelayoutPodsNotSeen": [""]}),
    ]
    tests = []
    for series, fired in cases:
        wanted = []
        for alert in ("RelayoutPodsNotSeen", "RelayoutNotUsed", "RelayoutSlowLoad"):
            asked = f'count by (alertname, pod) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
            samples = [
                {"labels": "{" + f'alertname="{alert}"' + (f', pod="{one}"' if one else "") + "}", "value": 1}
                for one in fired.get(alert, [])
            ]
            wanted.append({"expr": asked, "eval_time": "20m", "exp_samples": samples})
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": wanted})
    file = tmp_path / "rules_test.yaml"
    rules = EXAMPLES / "prometheus_rules.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    for words in (["check", "rules", str(rules)], ["test", "rules", str(file)]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifests_run_the_images_of_the_page_as_their_user() -> None:
    dockerfile = (ROOT / ".github" / "container" / "Dockerfile").read_text()
    assert dockerfile.count("USER 2001") == 2
    objects = [one for file in (MANIFEST, JOB, JOBS) for one in yaml.safe_load_all(file.read_text())]
    specs = [one["spec"]["template"]["spec"] for one in objects]
    containers = [one for spec in specs for one in (*spec.get("initContainers", []), *spec["containers"])]
    assert {one["image"] for one in containers} == set(re.findall(r"-t (\S+)", IMAGES))
    assert {spec["securityContext"]["runAsUser"] for spec in specs} == {2001}
    assert not any("fsGroup" in spec["securityContext"] for spec in specs)  # It changes modes of the source.


REAL_KUBECTL = shutil.which("kubectl")


@pytest.mark.skipif(REAL_KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda one: one.relative_to(KUBERNETES).as_posix())
def test_kubectl_renders_what_the_pods_of_these_tests_run(folder: Path) -> None:
    if yaml.safe_load((folder / "kustomization.yaml").read_text())["kind"] == "Component":
        return  # Rendered by the folders that name it, and below.
    rendered = list(yaml.safe_load_all(kustomized(folder)))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in render(folder)}
    assert {(one["kind"], one["metadata"]["name"]): one for one in rendered} == by_name


def kustomized(folder: Path) -> str:
    assert REAL_KUBECTL is not None
    done = subprocess.run([REAL_KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=PATIENCE)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.skipif(REAL_KUBECTL is None, reason="kubectl is not installed")
def test_kubectl_adds_trust_to_the_fleet_and_to_the_canary(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))
    with (copied / "fleet" / "kustomization.yaml").open("a") as file:
        file.write("components: [../trust]\n")
    for name in ("fleet", "canary", "llama-2/fleet"):
        pod = yaml.safe_load(kustomized(copied / name))["spec"]["template"]["spec"]
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {"name": "RELAYOUT_TRUST", "value": "/trust/trusted.toml"} in container["env"]
            assert [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "trust"] == ["/trust"]
        assert {"name": "trust", "configMap": {"name": "relayout-trust"}} in pod["volumes"]


def test_new_weights_are_refused_if_an_argument_has_moved(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))
    manifest = copied / "fleet" / "deployment.yaml"
    manifest.write_text(manifest.read_text().replace("args: [copy, ", "args: [--quiet, copy, "))
    with pytest.raises(ValueError, match="initContainers/0/args/1: 'copy', expected '/models/llama-tp8'"):
        render(copied / "llama-2" / "fleet")
    if REAL_KUBECTL is not None:
        assert "initContainers/0/args/1 failed" in kustomized(copied / "llama-2" / "fleet")


def test_what_commands_of_the_page_name_is_in_the_manifests() -> None:
    """With one pod that converts, or many; and an autoscaler's number of pods is nobody's else."""
    deployment, one = yaml.safe_load(MANIFEST.read_text()), yaml.safe_load(JOB.read_text())
    many = {job["metadata"]["name"]: job for job in yaml.safe_load_all(JOBS.read_text())}
    assert "replicas" not in deployment["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selected = deployment["spec"]["selector"]["matchLabels"]
    assert selected.items() <= labels.items()
    assert "app" not in selected  # The canary's pod gets that label while it runs.
    for job in (one, many[one["metadata"]["name"]]):
        assert f"job/{job['metadata']['name']} -c {job['spec']['template']['spec']['containers'][0]['name']}" in PAGE
    for script in STEPS:
        named = set(re.findall(r"deployment/(\S+)", script))
        assert named <= {"llama", "llama-canary", deployment["metadata"]["name"]}
