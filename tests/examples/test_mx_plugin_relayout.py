"""The plugin of ModelExpress, by ModelExpress's own loader of plugins.

What it loads is compared in the real vLLM: `tools/run engines vllm --step modelexpress`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples"
plugins = pytest.importorskip("modelexpress.plugins", reason="ModelExpress 0.8 is not installed")


def test_modelexpress_finds_it_and_passes_over_it_where_vllm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_PLUGIN_DIR", str(EXAMPLES))
    plugins.initialize_plugins()
    assert set(plugins.plugins) == {"relayout"}
    strategy = plugins.get_plugin("relayout")
    assert strategy.name == "relayout"
    assert not strategy.is_available(SimpleNamespace(model_config=object(), is_reload=False, adapter=None))
