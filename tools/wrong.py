"""Gives relayout 100 wrong inputs of users, and checks what it answers: exit code, message, and the next command.

Each input runs in a fresh folder, through the command line or the Python API, in a process of its own. An answer is
right if the exit code is the documented one, no traceback is printed, the first line names the location and what was
found or expected, and the last line is the next command, or says what to do in words. Messages of the Python API say it
in their text. `--out FILE` writes the answers, which `docs/reference/WRONG_INPUTS.md` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from support import prestarted
from support.bits import flip
from support.command_runs import CONFIG, write_model
from support.rights import drop_superuser_rights
from support.terminals import ENVIRONMENT

RESULTS = Path(__file__).parent / "results" / "wrong_inputs.json"
NEXT = "relayout: next: "
_SECONDS = 120
"""Time limit of one command."""
SetUp = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a wrong input was answered with."""

    code: int
    lines: tuple[str, ...]
    """Lines of stderr, without progress and warnings."""

    @staticmethod
    def of(code: int, stderr: str, work: Path, url: str = "http://SERVER") -> Answer:
        """Return the answer of a process that ran in a folder; names of folders and servers are replaced."""
        lines = (line for line in stderr.splitlines() if not line.startswith("relayout: warning: "))
        texts = (line.replace(str(work), "WORK").replace(url, "http://SERVER") for line in lines)
        return Answer(code, tuple(texts))

    @property
    def message(self) -> str:
        """The first line, without the prefix."""
        return self.lines[0].removeprefix("relayout: ").removeprefix("error: ") if self.lines else ""

    def texts(self) -> dict[str, str]:
        """Return the message and the next command, as they are recorded."""
        return {"message": self.message, "next": self.next}

    @property
    def next(self) -> str:
        """The next command, or what to do in words; empty if the answer has none."""
        return self.lines[-1].removeprefix(NEXT) if len(self.lines) > 1 and self.lines[-1].startswith(NEXT) else ""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong input, and the expected answer."""

    area: str
    input: str
    """Arguments of `relayout`; or, in the area "python", statements that follow `import relayout`."""
    says: str
    """A pattern of the first line: the location, and what was found or expected."""
    set_up: SetUp | None = field(default=None, kw_only=True)
    """Prepares the folder, which has the content of `make_world`."""
    code: int = field(default=2, kw_only=True)
    environment: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    unprivileged: bool = field(default=False, kw_only=True)
    """True to run without the right of a superuser to pass over permission bits."""
    interrupted: bool = field(default=False, kw_only=True)
    """True to send SIGINT after the first progress."""
    num_files: int | None = field(default=None, kw_only=True)
    """Limit of open files."""

    @property
    def is_python(self) -> bool:
        """True if the input is a program."""
        return self.area == "python"


def problems(wrong: Wrong, answer: Answer) -> list[str]:
    """Return what is wrong with an answer; empty if it is as expected."""
    found = []
    if answer.code != wrong.code:
        found.append(f"exit code {answer.code}, expected {wrong.code}")
    if any("Traceback" in line for line in answer.lines):
        found.append("has a traceback")
    if not answer.lines or not answer.lines[0].startswith("relayout: "):
        found.append("does not begin with 'relayout: '")
    if not re.search(wrong.says, answer.message):
        found.append(f"does not match {wrong.says!r}")
    if not wrong.is_python and not answer.next:
        found.append("has no next command")
    return found


def words_of(text: str) -> list[str]:
    """Return the arguments of an input of the command line."""
    return shlex.split(text)


def make_world(folder: Path) -> None:
    """Write what every input finds: a model, its conversions, another version of it, a delta between both."""
    import relayout

    write_model(folder / "model")
    write_model(folder / "newer")
    weights = load_file(folder / "newer" / "model.safetensors")
    weights["model.norm.weight"] = np.ones_like(weights["model.norm.weight"])
    save_file(weights, folder / "newer" / "model.safetensors", metadata={"format": "pt"})
    for name in ("model", "newer"):
        relayout.convert(folder / name, folder / f"{name}-tp2", tp=2)
    relayout.delta(folder / "model-tp2", folder / "newer-tp2", folder / "delta")


# Set-ups. Each gets the folder of its input.


def put(name: str, content: str | bytes = "") -> SetUp:
    """Write a file."""

    def act(work: Path) -> None:
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return act


def edit(name: str, change: Callable[[Any], object]) -> SetUp:
    """Change a JSON file."""

    def act(work: Path) -> None:
        parsed = json.loads((work / name).read_text())
        change(parsed)
        (work / name).write_text(json.dumps(parsed))

    return act


def remove(*names: str) -> SetUp:
    """Remove files or folders."""

    def act(work: Path) -> None:
        for name in names:
            path = work / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return act


def cut_off(name: str, nbytes: int) -> SetUp:
    """Truncate a file."""
    return lambda work: os.truncate(work / name, nbytes)


def damage(pattern: str) -> SetUp:
    """Flip the last bit of a file."""
    return lambda work: flip(next(work.glob(pattern)), -1)


def mode(name: str, bits: int) -> SetUp:
    """Change permission bits."""
    return lambda work: (work / name).chmod(bits)


def both(*acts: SetUp) -> SetUp:
    """Do one after another."""

    def act(work: Path) -> None:
        for each in acts:
            each(work)

    return act


def header(change: Callable[[dict[str, Any]], object]) -> SetUp:
    """Change the JSON header of the model's shard."""

    def act(work: Path) -> None:
        path = work / "model" / "model.safetensors"
        blob = path.read_bytes()
        (length,) = struct.unpack("<Q", blob[:8])
        parsed = json.loads(blob[8 : 8 + length])
        change(parsed)
        written = json.dumps(parsed).encode()
        path.write_bytes(struct.pack("<Q", len(written)) + written + blob[8 + length :])

    return act


def twice(work: Path) -> None:
    """Name a tensor twice in a header."""
    path = work / "model" / "model.safetensors"
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    written = blob[8 : 8 + length].rstrip().replace(b'"model.norm.weight"', b'"lm_head.weight"')
    path.write_bytes(struct.pack("<Q", len(written)) + written + blob[8 + length :])


def tensors(change: Callable[[dict[str, Any]], object]) -> SetUp:
    """Change the tensors of the model."""

    def act(work: Path) -> None:
        path = work / "model" / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "pt"})

    return act


def adapter(work: Path) -> None:
    """Write a LoRA adapter."""
    folder = work / "adapter"
    folder.mkdir()
    save_file({"base_model.model.q.lora_A.weight": np.ones((4, 8), np.float16)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/model"}')


def indexed(work: Path, weight_map: Mapping[str, str]) -> None:
    """Write an index of shards next to the one shard."""
    index = {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}
    (work / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(work: Path) -> None:
    """Let the index name a shard that was not downloaded."""
    names = list(load_file(work / "model" / "model.safetensors"))
    (work / "model" / "model.safetensors").rename(work / "model" / "model-00001-of-00002.safetensors")
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    indexed(work, {name: files[i > 3] for i, name in enumerate(names)})


def without(package: str) -> SetUp:
    """Let Python start as if a package were not installed."""
    return put(
        "shadow/sitecustomize.py",
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_other(name, *where):\n"
        f"    return None if name.partition('.')[0] == {package!r} else find(name, *where)\n"
        "PathFinder.find_spec = find_other\n",
    )


SHADOWED = {"PYTHONPATH": "shadow"}
GGUF = b"GGUF\x03\0\0\0" + bytes(64)
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"


def _area(area: str) -> Callable[..., Wrong]:
    return partial(Wrong, area)


_path, _source, _output = _area("path"), _area("checkpoint"), _area("output")
_option, _converted, _store = _area("option"), _area("converted folder"), _area("store")
_update, _system, _python = _area("update"), _area("system"), _area("python")

INPUTS: Sequence[Wrong] = (
    # Paths.
    _path("inspect modle", r"^modle: no such file or folder; did you mean 'model'\?"),
    _path("inspect /nosuch/llama", r"^/nosuch/llama: no such file or folder"),
    _path("convert modle --tp 2", r"^modle: no such file or folder; did you mean 'model'\?"),
    _path("verify mod", r"^mod: no such file or folder"),
    _path("inspect meta-lama/Llama-3.1-8B", r"^meta-lama/Llama-3\.1-8B: no such file or folder"),
    _path("inspect model/config.json", r"^model/config\.json: .*\.safetensors"),
    _path("convert model/model.safetensors --tp 2", r"a single file: name the folder to write with -o OUT"),
    _path("convert empty --tp 2", r"^empty: contains no safetensors file", set_up=lambda w: (w / "empty").mkdir()),
    _path("inspect s3:/bucket/model", r"^s3:/bucket/model: a URL has two slashes: s3://bucket/model"),
    _path("inspect ftp://host/model", r"^ftp://host/model: "),
    _path("inspect ''", r"^path: '', expected"),
    _path("restore model -o back", r"^model: not a converted folder \(relayout\.json is missing\)"),
    _path("inspect loop", r"^loop: ", set_up=lambda w: (w / "loop").symlink_to("loop"), code=2),
    _path("doctor modle --rank 2", r"^modle: no such file or folder; did you mean 'model'\?"),
    # Checkpoints.
    _source(
        "convert pickled --tp 2",
        r"^pickled: contains no safetensors file; found pytorch_model\.bin: .*save_pretrained",
        set_up=both(put("pickled/pytorch_model.bin", "PK"), put("pickled/config.json", json.dumps(CONFIG))),
    ),
    _source("convert gguf --tp 2", r"found model\.Q4_K_M\.gguf: ", set_up=put("gguf/model.Q4_K_M.gguf", GGUF)),
    _source("convert adapter --tp 2", r"^adapter.*LoRA adapter", set_up=adapter),
    _source("convert adapter --tp 1", r"^adapter.*LoRA adapter", set_up=adapter),
    _source("convert model --tp 2", r"git-lfs pointer", set_up=put("model/model.safetensors", POINTER)),
    _source(
        "convert model --tp 2",
        r"^model/model\.safetensors: .*truncated",
        set_up=cut_off("model/model.safetensors", 1000),
    ),
    _source(
        "convert model --tp 2",
        r"^model/model\.safetensors: .*truncated",
        set_up=cut_off("model/model.safetensors", 90_000),
    ),
    _source("convert model --tp 2", r"^model/model\.safetensors: 0 bytes", set_up=put("model/model.safetensors")),
    _source(
        "convert model --tp 2", r"^model/model\.safetensors: ", set_up=put("model/model.safetensors", "<html>" * 99)
    ),
    _source("convert model --tp 2", r"^model/model-00002-of-00002\.safetensors: is missing", set_up=missing_shard),
    _source("convert model --tp 2", r"^model: config\.json is missing or empty", set_up=remove("model/config.json")),
    _source("convert model --tp 2", r"^model/config\.json: not valid JSON", set_up=put("model/config.json", "{,")),
    _source("convert model --tp 2", r"^model/config\.json: a JSON list", set_up=put("model/config.json", "[]")),
    _source("convert model --tp 2", r"^model/config\.json", set_up=put("model/config.json", b"\xff\xfe{")),
    _source(
        "convert model --tp 2",
        r"config\.json declares 2 heads of 2 elements",
        set_up=edit("model/config.json", lambda c: c.pop("num_attention_heads")),
    ),
    _source(
        "convert model --tp 2",
        r"config\.json declares 2 heads of 9 elements",
        set_up=edit("model/config.json", lambda c: c.update(num_attention_heads=7)),
    ),
    _source(
        "convert model --tp 2",
        r"no built-in plan for model type 'lama'",
        set_up=edit("model/config.json", lambda c: c.update(model_type="lama")),
    ),
    _source(
        "convert model --tp 2",
        r"^model/model\.safetensors\.index\.json: not valid JSON",
        set_up=put("model/model.safetensors.index.json", "{"),
    ),
    _source(
        "convert model --tp 2",
        r"^model/model\.safetensors\.index\.json: .*weight_map",
        set_up=put("model/model.safetensors.index.json", "{}"),
    ),
    _source(
        "convert model --tp 2",
        r"'lm_head\.weigth'",
        set_up=lambda w: indexed(w, {"lm_head.weigth": "model.safetensors"}),
    ),
    _source("convert model --tp 2", r"occurs twice", set_up=twice),
    _source(
        "convert model --tp 2",
        r"unknown dtype 'F17'",
        set_up=header(lambda h: h["lm_head.weight"].update(dtype="F17")),
    ),
    _source(
        "convert model --tp 2",
        r"data_offsets .*lm_head|lm_head.*data_offsets",
        set_up=header(lambda h: h["lm_head.weight"].update(dtype="F32")),
    ),
    _source(
        "convert model --tp 2",
        r"tensor 'model\.layers\.0\.mlp\.extra\.weight': no rule matches|no rule",
        set_up=tensors(lambda t: t.update({"model.layers.0.mlp.extra.weight": np.ones((4, 4), np.float16)})),
    ),
    _source(
        "convert model --tp 2",
        r"^model/model\.safetensors: ",
        set_up=both(remove("model/model.safetensors"), lambda w: (w / "model" / "model.safetensors").mkdir()),
    ),
    _source("convert model-tp2 --tp 4", r"^model-tp2: is already a converted checkpoint"),
    _source(
        "convert model --tp 2",
        r"symbolic link that leads out of the checkpoint",
        set_up=both(
            lambda w: (w / "model" / "model.safetensors").rename(w / "blob"),
            lambda w: (w / "model" / "model.safetensors").symlink_to(w / "blob"),
        ),
    ),
    _source(
        "inspect model",
        r"^model/model\.safetensors: cannot be read: ",
        set_up=both(
            remove("model/model.safetensors"), lambda w: (w / "model" / "model.safetensors").symlink_to("gone")
        ),
    ),
    # Options.
    _option("convert model", r"missing option '--tp'"),
    _option("convert model --tp eight", r"'--tp'.*expected a whole number"),
    _option("convert model --tp 0", r"tp: 0, expected 1 to"),
    _option("convert model --tp -2", r"tp: -2, expected 1 to"),
    _option("convert model --tp 3", r"^tensor |^model.*tensor .*not a multiple of 3|cannot share evenly"),
    _option("convert model --tp 64", r"not a multiple of 64|cannot share evenly"),
    _option("convert model --tp 2 --memory lots", r"'lots' is not a size; write"),
    _option("convert model --tp 2 --memory 1MB", r"memory: 1000000 bytes, expected 2097152 or more"),
    _option("convert model --tp 2 --max-part-size 4GG", r"'4GG' is not a size; write"),
    _option("convert model --tp 2 --align 3000", r"align: 3000 bytes, expected a power of two"),
    _option("convert model --tp 2 --threads 0", r"threads: 0, expected 1 or more"),
    _option("convert model --tp 2 --layout hole", r"'hole'"),
    _option("convert model --tp 2 --plan lama", r"no built-in plan 'lama'; did you mean 'llama'\?"),
    _option("convert model --tp 2 --plan mine.toml", r"mine\.toml"),
    _option("convert model --tp 2 --plan mine.toml", r"mine\.toml: not valid TOML", set_up=put("mine.toml", "[cut\n")),
    _option("convert model --tp 2 -o out --plan gpt2", r"^model: tensor .*no rule of plan 'builtin:gpt2'"),
    _option("convert model --tp 2 --ranks 0-5", r"ranks: '0-5', expected some of 0 to 1"),
    _option("convert model --tp 2 --ranks a", r"ranks: 'a', expected"),
    _option("convert model --tp 2 --unit 3/2", r"unit '3/2', expected K/N"),
    _option("convert model --tp 2 --unit 0/2 --commit", r"--unit cannot be combined with --commit"),
    _option("convert model --tp 2 --expert-parallel", r"^model: no tensor matches the experts"),
    _option("convert model --tp 1 --expert-parallel", r"^model: expert_parallel: one rank holds all experts"),
    _option("convert model --tq 2", r"no such option"),
    _option("convrt model --tp 2", r"no such command 'convrt'; did you mean 'convert'\?"),
    _option("convert", r"missing argument"),
    _option("convert model newer --tp 2", r"unexpected extra argument"),
    _option("inspect model --rank 0", r"^model: not converted, so it has no ranks: omit --rank"),
    _option("inspect model-tp2 --rank 2", r"rank 2, expected 0 to 1"),
    _option("inspect model-tp2 --tp 4", r"^model-tp2: already converted: omit --tp"),
    _option("doctor model-tp2 --device cuda:9", r"cuda"),
    _option("doctor model-tp2 --device gpu", r"^device 'gpu': "),
    _option("warm model-tp2 --memory all", r"'all' is not a size"),
    _option("files model-tp2 --format json", r"json"),
    _option("plans show lama", r"no built-in plan 'lama'; did you mean 'llama'\?"),
    _option("cache list", r"no cache: .*RELAYOUT_CACHE"),
    _option("cache remove 3f2a --folder cache", r"^cache: has no entry '3f2a'"),
    _option("report model", r"^model: not converted: set --tp N"),
    _option(
        "report model-tp2 -o page.html",
        r"page\.html: exists and is not a relayout report",
        set_up=put("page.html", "x"),
    ),
    _option("bench model-tp2 --runs 0 --no", r"runs: 0"),
    # Outputs.
    _output("convert model --tp 2", r"^model-tp2: already holds"),
    _output(
        "convert model --tp 1 -o model-tp2 --if-missing",
        r"^model-tp2: is not what this command makes: TP is 2, expected 1",
    ),
    _output("convert model --tp 2 -o out", r"^out: is not empty: holds 'mine'", set_up=put("out/mine", "mine")),
    _output("convert model --tp 2 -o out --force", r"^out: .*'mine'", set_up=put("out/mine", "mine")),
    _output("convert model --tp 2 -o out", r"^out: exists and is not a folder", set_up=put("out", "mine")),
    _output("convert model --tp 2 -o model", r"^model: is the source itself|inside the source"),
    _output("convert model --tp 2 -o model/out", r"is inside the source folder"),
    _output("convert model --tp 2 -o no/such/out", r"its parent folder does not exist"),
    _output("convert model --tp 2 -o https://host/out", r"cannot write to this store"),
    _output("restore model-tp2 -o model", r"^model: is not empty"),
    _output("copy model-tp2 model", r"^model: is not empty"),
    _output("copy model-tp2 model-tp2", r"^model-tp2: is the source itself"),
    _output("copy model-tp2 out --ranks 7", r"ranks: '7', expected some of 0 to 1"),
    # Converted folders.
    _converted("verify model-tp2", r"relayout\.json: not valid JSON", set_up=put("model-tp2/relayout.json", "{")),
    _converted(
        "inspect model-tp2",
        r"relayout\.json: .*self_digest",
        set_up=edit("model-tp2/relayout.json", lambda top: top.update(model_type="mistral")),
    ),
    _converted("verify model-tp2", r"relayout\.json: is missing", set_up=remove("model-tp2/relayout.json")),
    _converted(
        "verify half",
        r"^half: no such file or folder; \.half\.relayout-partial next to it",
        set_up=lambda w: (w / ".half.relayout-partial").mkdir(),
    ),
    _converted(
        "restore model-tp2 -o back",
        r"^model-tp2/model-rank-1-part-0\.safetensors: is missing",
        set_up=remove("model-tp2/model-rank-1-part-0.safetensors"),
    ),
    _converted(
        "copy model-tp2 out",
        r"model-tp2/.*damaged",
        set_up=damage("model-tp2/*.safetensors"),
    ),
    _converted("restore model-tp2 -o back", r"model-tp2/.*(damaged|digest)", set_up=damage("model-tp2/*.safetensors")),
    _converted(
        "copy model-tp2 out",
        r"model-tp2/",
        set_up=lambda w: os.truncate(next((w / "model-tp2").glob("*.safetensors")), 999),
    ),
    _converted("sign model-tp2 --key nokey.pem", r"^nokey\.pem: No such file", code=3),
    _converted("sign model-tp2 --key key.pem", r"key\.pem", set_up=put("key.pem", "no key")),
    _converted("verify model-tp2 --trust policy.toml", r"policy\.toml: the trust policy does not exist"),
    _converted(
        "verify model-tp2 --trust policy.toml", r"policy\.toml: not a policy", set_up=put("policy.toml", "a = 1\n")
    ),
    # Updates.
    _update("delta model-tp2 model -o d", r"^model: not a converted folder"),
    _update("apply newer-tp2 delta -o out", r"another base, or another order"),
    _update("apply model-tp2 newer-tp2 -o out", r"newer-tp2"),
    _update("apply model-tp2 dleta -o out", r"^dleta: no such file or folder"),
    _update("steps model", r"^model: has no steps"),
    _update("steps nosuch", r"^nosuch: has no steps"),
    # Stores.
    _store("inspect http://127.0.0.1:9/model", r"the server cannot be reached, it refuses connections", code=3),
    _store("inspect {server}/404/model", r"/404/model: ", code=2),
    _store("inspect {server}/403/model", r"HTTP 403", code=3),
    _store(
        "inspect hf://org/mdoel",
        r"^hf://org/mdoel: not found on the hub",
        code=3,
        environment={"HF_ENDPOINT": "{server}/404"},
    ),
    _store("inspect hf://mdoel", r"expected hf://ORG/MODEL"),
    _store(
        "inspect s3://bucket/model",
        r"^s3://bucket/model: ",
        code=3,
        environment={
            "AWS_ENDPOINT_URL": "{server}/403",
            "AWS_ALLOW_HTTP": "1",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        },
    ),
    _store("inspect az://account/model", r"^az://account", code=2),
    _store("inspect oci://127.0.0.1:9/NAME:tag", r"lower case"),
    _store("inspect s3://bucket/model", r"obstore.*not installed", set_up=without("obstore"), environment=SHADOWED),
    _store(
        "inspect hf://org/model",
        r"huggingface_hub.*not installed",
        set_up=without("huggingface_hub"),
        environment=SHADOWED,
    ),
    # The system.
    _system(
        "convert model --tp 2 -o locked/out",
        r"^WORK/locked/out: Permission denied",
        set_up=lambda w: (w / "locked").mkdir(0o555),
        code=3,
        unprivileged=True,
    ),
    _system(
        "inspect model",
        r"^model/model\.safetensors: cannot be read",
        set_up=mode("model/model.safetensors", 0),
        unprivileged=True,
    ),
    _system(
        "inspect model", r"^model/relayout\.json: Permission denied", set_up=mode("model", 0), code=3, unprivileged=True
    ),
    _system(
        "convert model --tp 2 -o full/out",
        r"^WORK/full/out: needs .* are free there",
        set_up=lambda w: full_disk(w / "full"),
        code=2,
    ),
    _system(
        "convert big --tp 1 -o out", r"^interrupted", set_up=lambda w: big_model(w / "big"), code=130, interrupted=True
    ),
    _system("bench model-tp2 --size 4GB --no", r"^model-tp2: is not a folder, or has a checkpoint"),
    _system("bench model-tp2 --no", r"torch.*not installed", set_up=without("torch"), environment=SHADOWED),
    # Python.
    _python("relayout.load('modle', rank=0)", r"modle: no such file or folder; did you mean 'model'\?"),
    _python("relayout.load('model', rank=0)", r"model: not converted .*set tp=N"),
    _python("relayout.load('model-tp2', rank=2)", r"rank 2, expected 0 to 1"),
    _python("relayout.load(['model-tp2'], rank=0)", r"^path: \['model-tp2'\], expected the path"),
    _python("relayout.load('model-tp2', rank='0')", r"rank"),
    _python("relayout.load('model-tp2', rank=0, device='gpu')", r"device"),
    _python("relayout.load('model-tp2', rank=0, backend='fast')", r"backend 'fast', expected"),
    _python("relayout.load('model-tp2', rank=0, names='*.lm_head')", r"no tensor matches"),
    _python("relayout.load('model-tp2', rank=0, thread=4)", r"thread"),
    _python(
        "relayout.load('model-tp2', rank=0)",
        r"damaged|length|bytes",
        set_up=lambda w: [os.truncate(p, 999) for p in (w / "model-tp2").glob("*.safetensors")],
    ),
    _python("relayout.load('model-tp2', rank=0, deltas='newer-tp2')", r"newer-tp2"),
    _python("relayout.load('newer-tp2', rank=0, deltas='delta')", r"another base"),
    _python("relayout.convert('model', 'out', tp=3)", r"cannot share evenly|not a multiple of 3"),
    _python("relayout.convert('model', 'out', tp='2')", r"tp"),
    _python("relayout.convert('model', 'out', tp=2, plan=7)", r"^plan: 7, expected"),
    _python("relayout.safe_open('model-tp2', 'tf')", r"framework"),
    _python("relayout.open('model-tp2', rank=0)['lm_head']", r"lm_head"),
    _python("relayout.save({}, 'out', tp=2)", r"no tensors to save"),
    _python("relayout.verify('model-tp2', ranks=[5])", r"ranks"),
    _python(
        "relayout.load('model-tp2', rank=0)", r"torch is not installed", set_up=without("torch"), environment=SHADOWED
    ),
)


def big_model(folder: Path) -> None:
    """Write a model whose conversion takes long enough to be interrupted."""
    folder.mkdir()
    save_file({f"t{i}": np.full(2**26, i, np.uint8) for i in range(16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def full_disk(folder: Path) -> None:
    """Mount a file system that is too small for the model."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True, capture_output=True)


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status that its path begins with."""

    def _answer(self) -> None:
        status = int(self.path.strip("/").partition("/")[0])
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server() -> Iterator[str]:
    """Run a server that refuses every request; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as one:
        thread = threading.Thread(target=one.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{one.server_address[1]}"
        one.shutdown()
        thread.join()


_PROGRAM = """
import sys
import relayout
try:
    exec(sys.argv[1])
except Exception as error:
    print("relayout:", error, file=sys.stderr)
    sys.exit(2 if isinstance(error, (relayout.RelayoutError, TypeError, ImportError)) else 3)
"""


def run(wrong: Wrong, world: Path, url: str) -> Answer:
    """Give one input to a process of its own, in a copy of the world."""
    work = world.parent / f"{world.name}-{INPUTS.index(wrong)}"
    shutil.copytree(world, work, symlinks=True)
    try:
        if wrong.set_up is not None:
            wrong.set_up(work)
        text = wrong.input.replace("{server}", url)
        words = ["-c", _PROGRAM, text] if wrong.is_python else ["-m", "relayout", *words_of(text)]
        done = _process(wrong, words, work, url)
    finally:
        if os.path.ismount(work / "full"):
            subprocess.run(["umount", str(work / "full")], check=True)
        shutil.rmtree(work)
    return done


def _environment(wrong: Wrong, work: Path, url: str) -> dict[str, str]:
    more = {name: value.replace("{server}", url) for name, value in wrong.environment.items()}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    if "PYTHONPATH" in more:
        more["PYTHONPATH"] = os.pathsep.join([str(work / more["PYTHONPATH"]), path])
    return {**ENVIRONMENT, "PYTHONPATH": path, "HF_HUB_OFFLINE": "0", **more}


def _process(wrong: Wrong, words: Sequence[str], work: Path, url: str) -> Answer:
    environment = _environment(wrong, work, url)
    if wrong.unprivileged or wrong.interrupted or "PYTHONPATH" in wrong.environment:
        code, stderr = _started(wrong, words, work, environment)
    else:  # A fork of a process that has imported what it needs takes a tenth of the time.
        how = {"script": _PROGRAM, "imports": prestarted.LOADER} if wrong.is_python else {}
        done = prestarted.run(*words[2:], cwd=work, env=environment, **how)
        code, stderr = done.returncode, done.stderr
    return Answer.of(code, stderr, work, url)


def _started(wrong: Wrong, words: Sequence[str], work: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run the input in an interpreter of its own; return the exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=drop_superuser_rights if wrong.unprivileged else None,
    )
    if wrong.interrupted:
        while process.poll() is None and not list(work.glob(".out.*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
    return process.returncode, stderr


def main() -> int:
    """Run all inputs, print the wrong answers, and write all answers."""
    parser = argparse.ArgumentParser(prog="wrong", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"file to write, such as {RESULTS.name}")
    parser.add_argument("--only", default="", help="inputs that have this text")
    chosen = parser.parse_args()
    some = [one for one in INPUTS if chosen.only in f"{one.area} {one.input}"]
    rows = []
    num_wrong = 0
    with TemporaryDirectory() as folder, server() as url:
        world = Path(folder) / "world"
        world.mkdir()
        make_world(world)
        for wrong in some:
            answer = run(wrong, world, url)
            bad = problems(wrong, answer)
            num_wrong += bool(bad)
            print(f"{'WRONG' if bad else 'right'} [{wrong.area}] {wrong.input}: {answer.code}")
            for line in (*answer.lines, *(f"  -- {what}" for what in bad)):
                print(f"    {line}")
            sys.stdout.flush()
            rows.append({"area": wrong.area, "input": wrong.input, "code": answer.code, **answer.texts()})
    print(f"{len(some)} inputs, {num_wrong} wrong answers")
    if chosen.out is not None:
        lines = ",\n".join(json.dumps(row) for row in rows)  # One input a line.
        chosen.out.write_text(f"[\n{lines}\n]\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
