"""Checks a source record: by itself, and against the other sidecar files of its folder. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relayout.checkpoint.converted import read_record
from relayout.checkpoint.folder import find_config
from relayout.checkpoint.source import SourceCheckpoint, model_order
from relayout.commands.consistency import check_copy
from relayout.commands.differences import Report
from relayout.commands.restore import recorded_source
from relayout.conversion.layout import not_for_dcp_because
from relayout.core.slices import WHOLE, num_bytes
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import dump_slice
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME, WHOLE_TENSORS, Manifest, RankTable
from relayout.format.manifest import SOURCE_RECORD_NAME
from relayout.format.source_record import SourceRecord, conversion_digest
from relayout.plans.family import VLLM
from relayout.plans.plan import Plan, check_all_held
from relayout.plans.planner import proven_rules
from relayout.storage.protocols import Store

Recorded = tuple[SourceRecord, SourceCheckpoint | None]
"""A record, and the source that it describes, None if its headers are damaged."""


def check_record(folder: Store, manifest: Manifest, report: Report) -> Recorded | None:
    """Check the source record, its copies in the manifest, and the side files. Return it if it can be read."""
    with report.errors_of(SOURCE_RECORD_NAME):
        record = read_record(folder, manifest)
        config = _config(folder, report)
        _check_facts(manifest, record, config, report)
        _check_side_files(folder, manifest, record, report)
        _check_cuts(record, report)
        _check_order(record, report)
        with report.errors_of(SOURCE_RECORD_NAME):
            source = recorded_source(folder, record, is_whole=False)
            _check_dcp(record, source, report)
            if config is not None:
                _check_rules(record, replace(source, config=config), report)
            return record, source
        return record, None
    return None


def _config(folder: Store, report: Report) -> Mapping[str, Any] | None:
    try:
        return find_config(folder).content
    except FormatError as error:
        if error.code != "unsafe":  # The comparison of side files reports links.
            report.add("config.json", str(error))
        return None


def _check_side_files(folder: Store, manifest: Manifest, record: SourceRecord, report: Report) -> None:
    own = {HUB_INDEX_NAME, *(file.name for file in manifest.files)}
    for side in record.side_files:
        if side.name in own or side.name.startswith("relayout."):
            report.add(SOURCE_RECORD_NAME, f"side file {shown(side.name)} has the name of a file that relayout writes")
        what = "differs from the file that was copied"
        check_copy(folder, side.name, side.nbytes, side.digest, manifest.digest, what, report)


def _check_cuts(record: SourceRecord, report: Report) -> None:
    """Check that the ranks together hold every element of each tensor, and that slices are in canonical form."""
    first = dict(zip(zip(record.cut_of, record.shapes, strict=True), record.names, strict=True))
    for (cut, shape), name in first.items():
        slices = record.cuts[cut].distinct
        try:
            check_all_held(shape, slices)
        except PlanError as error:
            report.add(SOURCE_RECORD_NAME, str(error), name)
        for part in slices:
            if (canonical := part.canonical(shape)) != part:
                what = f"slice {dump_slice(part)} of {list(shape)}, canonical form is {dump_slice(canonical)}"
                report.add(SOURCE_RECORD_NAME, what, name)


def _check_order(record: SourceRecord, report: Report) -> None:
    in_order = sorted(record.names, key=lambda name: (model_order(name), name))
    for name, expected in zip(record.names, in_order, strict=True):
        if name != expected:
            report.add(SOURCE_RECORD_NAME, f"is not in model order: {shown(expected)} comes before it", name)
            return


def _check_dcp(record: SourceRecord, source: SourceCheckpoint, report: Report) -> None:
    options = record.options
    plan = Plan(options.plan, options.num_ranks, record.cuts, record.cut_of)
    reason = not_for_dcp_because(source, plan, options.layout)
    if options.dcp and reason is not None:
        report.add(SOURCE_RECORD_NAME, f"dcp is true: {reason}")


def _check_facts(manifest: Manifest, record: SourceRecord, config: Mapping[str, Any] | None, report: Report) -> None:
    """Check the manifest's copies of facts; of model_type only if config.json can be read."""
    options = record.options
    model_type = manifest.model_type if config is None else config.get("model_type")
    sizes = (num_bytes(dtype, shape) or 0 for dtype, shape in zip(record.dtypes, record.shapes, strict=True))
    expected = {
        "conversion": conversion_digest(record),
        "model_type": model_type if isinstance(model_type, str) else None,
        "plan": options.plan,
        "expert_parallel": options.expert_parallel,
        "alignment": options.alignment,
        "dcp": options.dcp,
        "source_nbytes": sum(sizes),
    }
    if (options.layout == WHOLE_TENSORS) != (manifest.whole is not None):
        report.add(MANIFEST_NAME, f"'whole' contradicts the layout {options.layout!r} of the source record")
    if None in record.digests and manifest.has_all:
        report.add(SOURCE_RECORD_NAME, "digests of source tensors are null, and the folder has all ranks")
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            field = "source.nbytes" if name == "source_nbytes" else name
            report.add(MANIFEST_NAME, f"{field} is {getattr(manifest, name)}, by the source record {value}")


def _check_rules(record: SourceRecord, source: SourceCheckpoint, report: Report) -> None:
    """Check that the rules, if there are any, give the recorded cuts: loads at other degrees need that."""
    if record.plan is not None and record.plan.origin != VLLM:
        try:
            proven_rules(source, record)
        except (FormatError, PlanError) as error:
            report.add(SOURCE_RECORD_NAME, f"cannot be loaded at another degree: {error}")


def check_slices(manifest: Manifest, tables: Mapping[int, RankTable], record: SourceRecord, report: Report) -> None:
    """Check that holders have the recorded slices, and that equal slices have equal digests."""
    shared: dict[tuple[int, int], str] = {}  # Digests of slices of several ranks, by tensor and slice.
    for rank, table in tables.items():
        name, rows = manifest.holders[rank].table, {tensor: row for row, tensor in enumerate(table.names)}
        for t, tensor in enumerate(record.names):
            row = rows.pop(tensor, None)
            cut = record.cut(t)
            is_rank = rank < len(cut.slices)
            part = cut.slices[rank] if is_rank else WHOLE
            if row is None:
                if part.is_held:
                    report.add(name, "is missing", tensor)
                continue
            expected = (record.dtypes[t], record.shapes[t], part, part.shape(record.shapes[t]))
            kind, digest = table.kinds[table.kind_of[row]], table.digests[row]
            if (kind.dtype, kind.source_shape, kind.part, kind.shape) != expected:
                report.add(name, f"is not the slice in the source record: {expected}", tensor)
            if part.is_whole and digest != record.digests[t]:
                report.add(name, "its digest differs from the source tensor's", tensor)
            elif is_rank and len(cut.holders[cut.which[rank]]) > 1:
                other = shared.setdefault((t, cut.which[rank]), digest)
                if other != digest:
                    what = f"its digest is {digest}, but {other} for the same slice of another rank"
                    report.add(name, what, tensor)
        for tensor in rows:
            report.add(name, "is not in the source record", tensor)
