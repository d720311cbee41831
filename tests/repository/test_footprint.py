"""What the plugins do to a process of an engine that does not use them; tools/engines asks the same of real ones."""

from __future__ import annotations

import json
from functools import cache

import pytest
from support import prestarted

pytestmark = pytest.mark.xdist_group("footprint")

IMPORTS = "torch,pytest,engines.footprint"
"""And nothing of relayout: what a plugin imports is seen."""
SCRIPT = """
import json, os, sys, threading
import pytest, torch
from importlib import import_module
from engines.footprint import footprint
import_module("support.fake_{engine}").install(pytest.MonkeyPatch(), with_plugin=False)
results = [footprint("{engine}")]

def patching():
    torch.nn.Module.train = torch.empty = print
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.meta_path.insert(0, sys.meta_path[0])
    import wave

if "{engine}" == "vllm":
    import relayout.plugins
    relayout.plugins.vllm = patching
    results.append(footprint("vllm"))
print(json.dumps(results))
"""
SMALL = {"blake3", "numpy", "xxhash", "zstandard"}
"""What relayout is made of: everything else must have been imported by the engine."""
FORMATS = "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER"
CHANGED = {
    "vllm": [f"{FORMATS}['auto']", f"{FORMATS}['relayout']"],
    "sglang": [
        "sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES[...]",
        "sglang.srt.plugins.hook_registry.HookRegistry.hooks['sglang.srt.configs.load_config.LoadConfig."
        "_verify_load_format']",
    ],
    "tokenspeed": ["tokenspeed.runtime.model_loader.loader._initialize_model"],
}


@cache
def found(engine: str) -> list[dict[str, list[str]]]:
    """What is found of a plugin in a process of its own; of vLLM also of one that does more."""
    done = prestarted.run(script=SCRIPT.format(engine=engine), imports=IMPORTS)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("engine", CHANGED)
def test_a_plugin_that_is_not_used_does_nothing_but_register(engine: str) -> None:
    result = found(engine)[0]
    assert result["changed"] == CHANGED[engine]
    assert {name.partition(".")[0] for name in result["imported"]} <= SMALL


def test_whatever_else_a_plugin_did_would_be_found() -> None:
    _, result = found("vllm")
    expected = {"environment", "threads", "import hooks", "torch.empty", "torch.nn.Module.train"}
    assert expected <= set(result["changed"])
    assert "wave" in result["imported"]
