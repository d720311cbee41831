"""Web servers: files below an https:// URL. They cannot be listed, so that well-known names are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from relayout.core.workers import each
from relayout.errors import FormatError
from relayout.storage.cloud.client import ObjectClient
from relayout.storage.cloud.store import CloudStore, refusal_of
from relayout.storage.protocols import Refusal, Store

_INDEX = "model.safetensors.index.json"
_KNOWN = (
    "relayout.json",
    _INDEX,
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "LICENSE",
    "README.md",
)
"""Files of checkpoints, of which a server is asked what it has."""


@dataclass(frozen=True, slots=True, repr=False)
class WebClient(ObjectClient):
    """A web server."""

    def names(self, prefix: str) -> Iterator[str]:
        """See `Client.names`: known names, and what an index names."""
        above = f"{prefix}/" if prefix else ""
        found = each(lambda name: self.stat(above + name) is not None, _KNOWN, self.cost.num_opens)
        names = [name for name, is_there in zip(_KNOWN, found, strict=True) if is_there]
        if _INDEX in names:
            names += self._shards(above)
        yield from (above + name for name in names)

    def _shards(self, above: str) -> list[str]:
        """The files that an index names. What is wrong with it is found by who reads the checkpoint."""
        try:
            named = json.loads(self.get(above + _INDEX, 0, None, None).content())["weight_map"].values()
            return sorted({name for name in named if isinstance(name, str)} - set(_KNOWN))
        except (ValueError, KeyError, TypeError, AttributeError, FormatError):
            return []


def offer(url: str) -> Store | Refusal:
    """See `stores.REGISTRY`: a folder or file of a web server."""
    refused = refusal_of(url)
    if refused is not None:
        return refused
    parts = urlsplit(url)
    return CloudStore(WebClient.of(f"{parts.scheme.lower()}://{parts.netloc}"), parts.path.strip("/"))
