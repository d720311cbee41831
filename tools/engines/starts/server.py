"""A whole server of vLLM whose weights change over HTTP, by the calls of docs/guides/RL.md, beside fresh servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from support.conversions import reference_tensors
from support.updates_worker import TP, write_steps

import relayout
from engines.cases import source_of
from engines.environments import Environment

FAMILIES = ("llama", "qwen3_moe")
_TRANSFER = ("--load-format", "relayout", "--weight-transfer-config", '{"backend": "relayout"}')
_OPTIONS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"),
    *("--max-model-len", "64", "--dtype", "bfloat16", "--host", "127.0.0.1", "--tensor-parallel-size", str(TP)),
)
_PROMPTS = [[5, 9, 2, 7], [11, 3, 8, 1, 30]]
_START_S, _ANSWER_S = 300, 120


def serve(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each model: what a server answers after a delta, a step of a root, and a sleep that lets the weights go."""
    for family in (family for family in FAMILIES if fnmatch(family, only)):
        root = work / "server" / family
        shutil.rmtree(root, ignore_errors=True)
        write_steps(source_of(family, work, wide=True), root, 2)
        publisher = relayout.Publisher(root / "root", config=root / "model-0", tp=TP)
        for step in range(3):
            publisher.publish(reference_tensors(root / f"model-{step}"), step)
        fresh = []
        for step in range(3):
            with running(environment, root / f"model-{step}", root / f"fresh-{step}.log") as server:
                fresh.append(server.answers())
        with running(environment, root / "step-0", root / "live.log", *_TRANSFER) as server:
            yield f"{family}, start", {"same": server.answers() == fresh[0]}
            for what, source, step in (("a delta", "delta-1", 1), ("a root", "root", 2), ("a folder", "step-0", 0)):
                said = server.update(root / source)
                attested = server.post("collective_rpc", method="relayout_attest")["results"]
                yield (
                    f"{family}, {what}",
                    {
                        "same": server.answers() == fresh[step],
                        "changes": fresh[step] != fresh[(step - 1) % 3],
                        "said": said,
                        "difference": [one["difference"] for one in attested],
                    },
                )
            server.post("sleep?level=2")
            server.post("wake_up")
            refused = server.update(root / "delta-1")
            said = server.update(root / "step-2")
            same = server.answers() == fresh[2]
            yield f"{family}, sleep at level 2", {"same": same, "said": said, "delta": refused[:200]}


@dataclass(frozen=True)
class Server:
    """A server that has started."""

    port: int

    def post(self, call: str, **values: Any) -> Any:
        """What it answers."""
        body, head = json.dumps(values).encode(), {"Content-Type": "application/json"}
        request = Request(f"http://127.0.0.1:{self.port}/{call}", body, head)
        with urlopen(request, timeout=_ANSWER_S) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def answers(self) -> list[Any]:
        """Tokens and their log-probabilities."""
        asked = {"prompt": _PROMPTS, "max_tokens": 6, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        choices = self.post("v1/completions", return_tokens_as_token_ids=True, **asked)["choices"]
        return [[choice["token_ids"], choice["logprobs"]["token_logprobs"]] for choice in choices]

    def update(self, source: Path) -> str:
        """Let it have other weights; what it says to that, if it refuses them."""
        self.post("start_weight_update")
        self.post("update_weights", update_info={"source": str(source)})
        self.post("pause?mode=keep")
        try:
            self.post("finish_weight_update")
        except HTTPError as error:
            return str(json.loads(error.read())["error"]["message"])
        finally:
            self.post("resume")
        return ""


@contextmanager
def running(environment: Environment, model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Start a server on a model; at the end it is gone, with all that it has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port))
    cores = "|".join(map(str, range(TP)))
    environment = environment.with_variables(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_OMP_THREADS_BIND=cores)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [environment.python, *module, *_OPTIONS, *options],
            env=environment.variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + _START_S
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no server on {model}: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(1)
        yield Server(port)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False
