"""Web servers: files below an https:// URL. They cannot be listed, so that well-known names are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, unquote, urlsplit

from relayout.core.workers import each
from relayout.format.fields import parse_object
from relayout.storage.cloud.client import CLOUD_COST, Body
from relayout.storage.cloud.connect import require
from relayout.storage.cloud.store import CloudStore, check_url
from relayout.storage.protocols import FileStat, RequestCost, Store
from relayout.storage.web import http

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
"""Files of checkpoints that are requested one by one."""


_MAX_INDEX_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class WebClient:
    """A web server."""

    root: str
    cost: ClassVar[RequestCost] = CLOUD_COST

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        return http.get(f"{self.root}/{quote(name)}", f"{self.root}/{name}", start, end, version)

    def stat(self, name: str) -> FileStat | None:
        return http.stat(f"{self.root}/{quote(name)}", f"{self.root}/{name}")

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Well-known names, and those that an index has."""
        above = f"{prefix}/" if prefix else ""
        stats = each(lambda name: self.stat(above + name), _KNOWN, self.cost.num_opens)
        versions = {name: stat.version for name, stat in zip(_KNOWN, stats, strict=True) if stat is not None}
        if _INDEX in versions:
            shards = self._shards(above)
            if "relayout.json" in versions:  # The index of a folder with slices only names a file that is not there.
                found = each(lambda name: self.stat(above + name), shards, self.cost.num_opens)
                shards = [name for name, stat in zip(shards, found, strict=True) if stat is not None]
            versions |= dict.fromkeys(shards, "")
        yield from ((above + name, version) for name, version in versions.items())

    def _shards(self, above: str) -> list[str]:
        """The files that an index names. The reader of the checkpoint checks these names."""
        location = f"{self.root}/{above}{_INDEX}"
        content = self.get(above + _INDEX, 0, None, None).content(_MAX_INDEX_NBYTES)
        named = parse_object(content, location).get("weight_map")
        values = named.values() if isinstance(named, dict) else ()
        return sorted({name for name in values if isinstance(name, str)} - set(_KNOWN))


def offer(url: str) -> Store:
    """A folder or file of a web server."""
    check_url(url)
    require("urllib3", url, "web")
    parts = urlsplit(url)
    return CloudStore(WebClient(f"{parts.scheme.lower()}://{parts.netloc}"), unquote(parts.path).strip("/"))
