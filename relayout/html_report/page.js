"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);

  // ---- Content ----------------------------------------------------------------------------------------------------
  function bytesOf(id) {
    const text = atob($(id).textContent), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }
  const inflated = new Blob([bytesOf("content")]).stream().pipeThrough(new DecompressionStream("gzip"));
  const content = await new Response(inflated).json();
  const { groups, names, group: groupOf, orders, files, ranks, kinds, shards } = content;
  let digests = null; // Decoded when the first is shown: they may be megabytes.
  const numRanks = content.num_ranks;
  const numHolders = numRanks + (content.layout === "whole" ? 1 : 0);
  const holderName = (h) => (h < numRanks ? `rank ${h}` : "whole tensors");
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  const decimal = d3.format(".3~s");
  const size = (n) => (n < 1000 ? `${n} bytes` : `${decimal(n).replace(/([kMGTP])$/, " $1")}B`.replace(/(\d)B$/, "$1 B"));
  const exact = (n) => `${d3.format(",")(n)} bytes`;
  const plural = (n, what) => `${d3.format(",")(n)} ${what}${n === 1 ? "" : "s"}`;
  const shapeOf = (shape) => (shape.length ? shape.join(" x ") : "scalar");
  const sliceOf = (t, h) => groups[groupOf[t]].slices[groups[groupOf[t]].which[h]];
  const sizeIn = (t, h) => (h < numRanks ? sliceOf(t, h).nbytes : groups[groupOf[t]].nbytes);
  const alignmentOf = (offset) => { let a = 1; while (a < 2 ** 21 && offset % (a * 2) === 0) a *= 2; return a; };

  // Ends of the slices of a file, relative to its data section. Files of ranks that are alike share them.
  const known = new Map();
  function endsOf(file) {
    const key = `${file.order}|${groups.map((g) => (file.holder < numRanks ? g.which[file.holder] && g.slices[g.which[file.holder]].nbytes : -1)).join()}`;
    if (!known.has(key)) {
      const order = orders[file.order], ends = new Float64Array(order.length);
      let end = 0;
      order.forEach((t, i) => { end += sizeIn(t, file.holder); ends[i] = end; });
      known.set(key, ends);
    }
    return known.get(key);
  }
  let row = 0;
  for (const file of files) {
    file.firstDigest = row;
    row += orders[file.order].length;
  }
  const bars = d3.range(numHolders).map((h) => {
    let at = 0;
    const own = files.filter((file) => file.holder === h).map((file) => {
      const placed = { file, ends: endsOf(file), begin: at };
      at += file.nbytes;
      return placed;
    });
    return { holder: h, files: own, nbytes: at };
  });
  const placeOf = bars.map(() => null); // Of each holder, on demand: tensor -> [number of the file, row].
  function place(h, t) {
    if (!placeOf[h]) {
      placeOf[h] = new Map();
      bars[h].files.forEach((one, f) => orders[one.file.order].forEach((tensor, i) => placeOf[h].set(tensor, [f, i])));
    }
    return placeOf[h].get(t);
  }
  const startIn = (one, i) => one.file.start + (i ? one.ends[i - 1] : 0);
  const hex = (file, i) => {
    digests ??= bytesOf("digests");
    const n = content.digest_nbytes, from = (file.firstDigest + i) * n;
    return Array.from(digests.subarray(from, from + n), (b) => b.toString(16).padStart(2, "0")).join("") + (n < 16 ? ` … (the first ${2 * n} of 32 digits)` : "");
  };

  // ---- Colors and patterns ----------------------------------------------------------------------------------------
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null, palette;
  const tiles = [
    () => {},
    (c) => { c.moveTo(0, 8); c.lineTo(8, 0); },
    (c) => { c.moveTo(0, 8); c.lineTo(8, 0); c.moveTo(0, 0); c.lineTo(8, 8); },
    (c) => { c.moveTo(0, 4); c.lineTo(8, 4); },
    (c) => { c.moveTo(0, 2); c.lineTo(8, 2); c.moveTo(0, 6); c.lineTo(8, 6); },
    (c) => { c.moveTo(0, 0); c.lineTo(8, 8); },
    (c) => { c.moveTo(4, 0); c.lineTo(4, 8); c.moveTo(0, 4); c.lineTo(8, 4); },
    (c) => { c.rect(3, 3, 2, 2); },
    (c) => { c.moveTo(4, 0); c.lineTo(4, 8); },
  ];
  function tile(color, ink, draw) {
    const canvas = document.createElement("canvas");
    const scale = devicePixelRatio || 1;
    canvas.width = canvas.height = 8 * scale;
    const c = canvas.getContext("2d");
    c.scale(scale, scale);
    c.fillStyle = color;
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = ink;
    c.lineWidth = 1;
    c.beginPath();
    draw(c);
    c.stroke();
    const pattern = c.createPattern(canvas, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale));
    return pattern;
  }
  function readPalette() {
    const style = getComputedStyle(root), value = (name) => style.getPropertyValue(name).trim();
    palette = { page: value("--page"), panel: value("--panel"), ink: value("--ink"), faint: value("--faint"), line: value("--line"), pale: value("--pale"), accent: value("--accent") };
    const soft = d3.color(palette.ink).copy({ opacity: 0.32 }).formatRgb();
    palette.kinds = kinds.map((_, k) => tile(value(`--k${k}`), soft, tiles[k]));
    palette.plain = kinds.map((_, k) => value(`--k${k}`));
    palette.scattered = kinds.map((_, k) => tile(palette.page, value(`--k${k}`), (c) => { c.lineWidth = 3; c.moveTo(-2, 10); c.lineTo(10, -2); c.moveTo(-2, 2); c.lineTo(2, -2); c.moveTo(6, 10); c.lineTo(10, 6); }));
  }
  function setTheme(forced) {
    root.dataset.theme = forced ?? chosen ?? (dark.matches ? "dark" : "light");
    readPalette();
    drawLegend();
    draw();
    drawShards();
  }

  // ---- The picture of all ranks -----------------------------------------------------------------------------------
  const canvas = $("files"), axis = d3.select("#axis");
  const total = d3.max(bars, (bar) => bar.nbytes) || 1;
  const left = 104, rowHeight = numHolders > 48 ? 12 : numHolders > 16 ? 18 : numHolders > 4 ? 26 : 38;
  let width = 0, transform = d3.zoomIdentity;
  const base = d3.scaleLinear().domain([0, total]);
  const scale = () => transform.rescaleX(base);
  let selected = null; // {h, f, i}: holder, its file, row in that file.

  function fit(element, height) {
    const w = element.clientWidth, ratio = devicePixelRatio || 1;
    if (element.width !== Math.round(w * ratio) || element.height !== Math.round(height * ratio)) {
      element.width = Math.round(w * ratio);
      element.height = Math.round(height * ratio);
      element.style.height = `${height}px`;
    }
    const c = element.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, w, height);
    return c;
  }

  function locate(bar, x) {
    // The file and row that hold byte x of a bar; row -1 is the header.
    const f = d3.bisectRight(bar.files.map((one) => one.begin), x) - 1, one = bar.files[f];
    if (!one || x >= one.begin + one.file.nbytes) return null;
    const inside = x - one.begin - one.file.start;
    if (inside < 0 || !one.ends.length) return { f, i: -1 };
    return { f, i: Math.min(d3.bisectRight(one.ends, inside), one.ends.length - 1) };
  }

  function draw() {
    const c = fit(canvas, numHolders * rowHeight + 4);
    width = canvas.clientWidth;
    base.range([left, width - 8]);
    const x = scale();
    axis.selectAll("g").data([0]).join("g").attr("transform", "translate(0,25)")
      .call(d3.axisTop(x).ticks(Math.max(2, (width - left) / 110)).tickFormat(tickText(x)).tickSizeOuter(0));
    axis.selectAll("g.tick").attr("display", (d) => (x(d) < left - 1 ? "none" : null));
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    bars.forEach((bar, h) => drawBar(c, bar, x, h * rowHeight + 2));
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, left - 4, numHolders * rowHeight + 4);
    c.fillStyle = palette.ink;
    bars.forEach((bar, h) => c.fillText(holderName(h), 8, h * rowHeight + rowHeight / 2 + 2));
    canvas.dataset.from = Math.max(0, Math.round(x.invert(left)));
    canvas.dataset.to = Math.min(total, Math.round(x.invert(width - 8)));
  }

  const tickText = (x) => {
    const [a, b] = [x.invert(left), x.invert(width)];
    return b - a < 5e6 ? (d) => d3.format(",")(d) : b - a < total / 50 ? (d) => `${d3.format(",.4~f")(d / 1e9)} GB` : (d) => size(d);
  };

  function drawBar(c, bar, x, y) {
    const top = y + 2, height = rowHeight - 4, [first, last] = [Math.max(left, Math.floor(x(0))), Math.min(width, Math.ceil(x(bar.nbytes)))];
    let run = null;
    const flush = (end) => {
      if (run === null) return;
      c.fillStyle = run.kind < 0 ? palette.faint : palette.kinds[run.kind];
      c.fillRect(run.from, top, end - run.from, height);
    };
    for (let px = first; px < last; px++) {
      const at = locate(bar, x.invert(px + 0.5));
      if (at === null) continue;
      const kind = at.i < 0 ? -1 : groups[groupOf[orders[bar.files[at.f].file.order][at.i]]].kind;
      if (run === null || run.kind !== kind) { flush(px); run = { kind, from: px }; }
    }
    flush(last);
    for (const one of bar.files) {
      // Borders of tensors that are wide enough to be told apart, and their names.
      const order = orders[one.file.order];
      const begin = one.begin + one.file.start;
      let i = d3.bisectRight(one.ends, x.invert(left) - begin);
      const perPixel = x.invert(1) - x.invert(0);
      const visible = x.invert(width) - begin;
      if (d3.bisectRight(one.ends, visible) - i < width) {
        for (; i < order.length && (i ? one.ends[i - 1] : 0) <= visible; i++) {
          const from = begin + (i ? one.ends[i - 1] : 0), to = begin + one.ends[i];
          if ((to - from) / perPixel < 4) continue;
          c.fillStyle = palette.panel;
          c.fillRect(Math.round(x(to)) - 1, top, 1, height);
          if ((to - from) / perPixel > 70 && rowHeight >= 18) {
            const [a, b] = [Math.max(left, x(from)) + 5, Math.min(width, x(to)) - 5];
            label(c, names[order[i]], a, b, top, height);
          }
        }
      }
      c.fillStyle = palette.ink;
      if (one.begin > 0 && x(one.begin) > left) c.fillRect(Math.round(x(one.begin)) - 1, y, 2, rowHeight);
    }
    if (selected && selected.h === bar.holder) {
      const one = bar.files[selected.f];
      const from = x(one.begin + startIn(one, selected.i)), to = x(one.begin + one.file.start + one.ends[selected.i]);
      c.lineWidth = 2;
      c.strokeStyle = palette.accent;
      c.strokeRect(Math.max(left, from) - 1, y, Math.max(3, Math.min(to, width + 4) - Math.max(left, from) + 2), rowHeight);
    }
  }

  function label(c, name, from, to, top, height) {
    const parts = name.replace(/\.weight$/, "").split(".");
    while (parts.length && c.measureText(parts.join(".")).width > to - from - 8) parts.shift();
    if (!parts.length) return;
    const text = parts.join("."), w = c.measureText(text).width;
    c.fillStyle = palette.page;
    c.globalAlpha = 0.82;
    c.fillRect(from, top + height / 2 - 7, w + 8, 14);
    c.globalAlpha = 1;
    c.fillStyle = palette.ink;
    c.fillText(text, from + 4, top + height / 2);
  }

  // ---- Selection --------------------------------------------------------------------------------------------------
  function select(h, f, i, zoomTo) {
    selected = { h, f, i };
    const one = bars[h].files[f], t = orders[one.file.order][i], g = groups[groupOf[t]];
    const offset = startIn(one, i), part = h < numRanks ? sliceOf(t, h) : null;
    const rows = [
      ["holder", holderName(h)],
      ["kind", kinds[g.kind]],
      ["whole tensor", `${g.dtype}, ${shapeOf(g.shape)}, ${exact(g.nbytes)}`],
      ["this slice", part ? `${shapeOf(part.shape)}, ${exact(part.nbytes)}` : "all of it"],
      ["part of the whole", part ? part.words : "whole"],
      ["held by", part ? `${plural(part.holders - (numHolders > numRanks && part.is_whole ? 1 : 0), "rank")}` : "all"],
      ["file", one.file.name],
      ["place in it", `byte ${d3.format(",")(offset)} to ${d3.format(",")(one.file.start + one.ends[i])}`],
      ["starts at a multiple of", exact(alignmentOf(offset)) + (alignmentOf(offset) === 2 ** 21 ? " or more" : "")],
      ["in the plain checkpoint", `${shards[content.shard[t]].name}, byte ${d3.format(",")(content.offset[t])}`],
      ["there it is", !part || part.pieces ? `${plural(part ? Math.max(1, part.pieces.length) : 1, "contiguous piece")}` : `${plural(part.runs, "run")} of ${exact(part.runs ? part.nbytes / part.runs : 0)}`],
    ];
    if (content.digest_nbytes) rows.push(["digest (XXH3-128)", hex(one.file, i)]);
    $("selected").textContent = names[t];
    $("detail").replaceChildren(...rows.map(([term, text]) => pair(term, text)));
    if (h < numRanks && Number($("rank").value) !== h) { $("rank").value = h; showRank(); }
    if (zoomTo) zoomToSelected();
    draw();
    showRows();
  }

  function pair(term, text) {
    const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = term;
    dd.textContent = text;
    box.append(dt, dd);
    return box;
  }

  function move(by) {
    if (!selected) { const f = bars[0].files.findIndex((one) => one.ends.length); if (f >= 0) select(0, f, 0); return; }
    let { h, f, i } = selected;
    i += by;
    while (i < 0 || i >= bars[h].files[f].ends.length) {
      f += Math.sign(by);
      if (f < 0 || f >= bars[h].files.length) return;
      i = by > 0 ? 0 : bars[h].files[f].ends.length - 1;
    }
    select(h, f, i);
    keepVisible();
  }

  function moveRank(by) {
    if (!selected) return move(1);
    const t = orders[bars[selected.h].files[selected.f].file.order][selected.i];
    for (let h = selected.h + by; h >= 0 && h < numHolders; h += by) {
      const found = place(h, t);
      if (found) { select(h, ...found); keepVisible(); return; }
    }
  }

  // ---- Zoom -------------------------------------------------------------------------------------------------------
  const zoom = d3.zoom().scaleExtent([1, Math.max(1, total / 256)]).on("zoom", (event) => { transform = event.transform; draw(); });
  const area = d3.select(canvas);
  function extent() { zoom.extent([[left, 0], [canvas.clientWidth - 8, 1]]).translateExtent([[left, 0], [canvas.clientWidth - 8, 1]]); }
  function showBytes(from, to) {
    const k = Math.min(Math.max(1, total / 256), Math.max(1, total / Math.max(1, to - from)));
    area.call(zoom.transform, d3.zoomIdentity.translate(left - k * base(from), 0).scale(k));
  }
  function bounds() {
    const one = bars[selected.h].files[selected.f];
    return [one.begin + startIn(one, selected.i), one.begin + one.file.start + one.ends[selected.i]];
  }
  function zoomToSelected() {
    if (!selected) return;
    const [from, to] = bounds(), more = Math.max(64, to - from);
    showBytes(Math.max(0, from - more), Math.min(total, to + more));
  }
  function keepVisible() {
    const [from, to] = bounds(), x = scale();
    if (x(from) < left || x(to) > width) {
      const span = x.invert(width - 8) - x.invert(left), middle = (from + to) / 2;
      if (to - from > span) zoomToSelected();
      else showBytes(Math.max(0, Math.min(total - span, middle - span / 2)), Math.min(total, Math.max(span, middle + span / 2)));
    }
  }
  function zoomBy(factor) {
    const x = scale(), [a, b] = [x.invert(left), x.invert(width - 8)];
    const middle = selected && bounds()[0] >= a && bounds()[1] <= b ? (bounds()[0] + bounds()[1]) / 2 : (a + b) / 2;
    const half = (b - a) / 2 / factor;
    const from = Math.max(0, Math.min(total - 2 * half, middle - half));
    showBytes(from, Math.min(total, from + 2 * half));
  }
  area.call(zoom).on("dblclick.zoom", null);
  area.on("click", (event) => {
    const [px, py] = d3.pointer(event), h = Math.floor((py - 2) / rowHeight);
    if (px < left || !bars[h]) return;
    const at = locate(bars[h], scale().invert(px));
    if (at && at.i >= 0) select(h, at.f, at.i);
  });
  canvas.addEventListener("mousemove", (event) => {
    const [px, py] = d3.pointer(event), bar = bars[Math.floor((py - 2) / rowHeight)];
    const at = px >= left && bar ? locate(bar, scale().invert(px)) : null;
    canvas.title = !at ? "" : at.i < 0 ? `${bar.files[at.f].file.name}: header` : names[orders[bar.files[at.f].file.order][at.i]];
  });
  canvas.addEventListener("keydown", (event) => {
    const acts = {
      ArrowRight: () => move(1), ArrowLeft: () => move(-1), ArrowDown: () => moveRank(1), ArrowUp: () => moveRank(-1),
      "+": () => zoomBy(2), "=": () => zoomBy(2), "-": () => zoomBy(0.5), 0: () => showBytes(0, total), Home: () => showBytes(0, total),
      Enter: zoomToSelected,
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); acts[event.key](); }
  });
  $("zoom-in").onclick = () => zoomBy(2);
  $("zoom-out").onclick = () => zoomBy(0.5);
  $("zoom-all").onclick = () => showBytes(0, total);
  $("zoom-selected").onclick = zoomToSelected;

  // ---- What a rank reads ------------------------------------------------------------------------------------------
  const inShard = shards.map(() => []);
  names.forEach((_, t) => inShard[content.shard[t]].push(t));
  inShard.forEach((list) => list.sort((a, b) => content.offset[a] - content.offset[b]));
  const startsIn = inShard.map((list) => Float64Array.from(list, (t) => content.offset[t]));
  const rankNow = () => Number($("rank").value);

  function drawShards() {
    const rank = rankNow(), height = shards.length > 60 ? 7 : shards.length > 20 ? 11 : 20, from = 8;
    const c = fit($("shards"), shards.length * height + 4), w = $("shards").clientWidth - 8;
    const x = d3.scaleLinear().domain([0, d3.max(shards, (one) => one.nbytes) || 1]).range([from, w]);
    shards.forEach((shard, s) => {
      const y = s * height + 3, starts = startsIn[s];
      const styleAt = (byte) => {
        const i = d3.bisectRight(starts, byte) - 1;
        if (i < 0) return palette.faint;
        const t = inShard[s][i], part = sliceOf(t, rank), inside = byte - starts[i];
        if (!part.is_held) return palette.pale;
        if (!part.pieces) return palette.scattered[groups[groupOf[t]].kind];
        return part.pieces.some(([a, n]) => inside >= a && inside < a + n) ? palette.plain[groups[groupOf[t]].kind] : palette.pale;
      };
      let style = null, begin = from;
      const end = Math.ceil(x(shard.nbytes));
      for (let px = from; px < end; px++) {
        const one = styleAt(x.invert(px + 0.5));
        if (one !== style) {
          if (style !== null) { c.fillStyle = style; c.fillRect(begin, y, px - begin, height - 2); }
          [style, begin] = [one, px];
        }
      }
      if (style !== null) { c.fillStyle = style; c.fillRect(begin, y, end - begin, height - 2); }
    });
  }

  function showRank() {
    const rank = ranks[rankNow()];
    const ways = [
      [content.converted ? "relayout.load, converted" : "relayout.load, after the conversion", rank.nbytes],
      ["slicing rows of the plain checkpoint", rank.by_rows_nbytes],
      ["whole shards of the plain checkpoint", content.whole_nbytes],
    ];
    const most = d3.max(ways, (way) => way[1]) || 1;
    fill($("reads").tBodies[0], ways.map(([way, nbytes]) => [way, bar([[nbytes / most, ""]]), num(size(nbytes)), num(`${(nbytes / Math.max(1, rank.nbytes)).toFixed(2)}x`)]));
    drawShards();
    showKinds();
    showRows();
  }

  // ---- Tables -----------------------------------------------------------------------------------------------------
  const num = (text) => ({ text, className: "number" });
  function bar(pieces) {
    const box = document.createElement("div");
    box.className = "bar";
    for (const [share, className] of pieces) {
      const span = document.createElement("span");
      span.style.width = `${100 * share}%`;
      span.className = className;
      box.append(span);
    }
    return { node: box, className: "wide" };
  }
  function fill(body, rows, tag = "td") {
    body.replaceChildren(...rows.map((cells) => {
      const tr = document.createElement("tr");
      tr.append(...cells.map((cell) => {
        const td = document.createElement(tag);
        if (tag === "th") td.scope = "col";
        if (typeof cell === "object") {
          td.className = cell.className || "";
          if (cell.node) td.append(cell.node); else td.textContent = cell.text;
        } else td.textContent = cell;
        return td;
      }));
      return tr;
    }));
  }

  function showMeasured() {
    const measured = content.measured;
    if (!measured) return;
    $("measured").hidden = false;
    $("verdict").textContent = measured.verdict;
    $("warnings").replaceChildren(...measured.warnings.map((text) => {
      const li = document.createElement("li");
      li.textContent = text;
      return li;
    }));
    fill($("loads").tHead, [["load", "loader", { text: "", className: "wide" }, num("s"), num("GB/s"), num("CPU s"), num("time / relayout")]], "th");
    fill($("loads").tBodies[0], measured.loads.flatMap(({ title, rows }) => {
      const most = d3.max(rows, (row) => row.seconds) || 1;
      return rows.map((row, i) => [
        i ? "" : title, row.title, bar([[row.seconds / most, row.is_ours ? "" : "other"]]), num(row.seconds.toFixed(2)),
        num(row.gb_per_s.toFixed(2)), num(row.cpu_seconds.toFixed(2)), num(row.ratio === null ? "" : `${row.ratio.toFixed(1)}x`),
      ]);
    }));
  }

  function showRanks() {
    const most = d3.max(ranks, (rank) => rank.nbytes) || 1;
    fill($("ranks").tHead, [["rank", { text: "striped: held by other ranks too", className: "wide" }, num("tensors"), num("bytes"), num("replicated"), num("of the largest rank"), num("files"), ...(content.reads ? [num("reads")] : [])]], "th");
    fill($("ranks").tBodies[0], ranks.map((rank, r) => [
      String(r), bar([[(rank.nbytes - rank.shared_nbytes) / most, ""], [rank.shared_nbytes / most, "shared"]]),
      num(d3.format(",")(rank.num_tensors)), num(size(rank.nbytes)), num(size(rank.shared_nbytes)), num(`${(100 * rank.nbytes / most).toFixed(2)} %`),
      num(String(bars[r].files.length)), ...(content.reads ? [num(d3.format(",")(content.reads[r]))] : []),
    ]));
  }

  function showKinds() {
    const rank = rankNow(), all = sum(groups.map((g) => g.nbytes * g.count)) || 1;
    const rows = kinds.map((kind, k) => {
      const of = groups.filter((g) => g.kind === k);
      const nbytes = sum(of.map((g) => g.nbytes * g.count)), held = sum(of.map((g) => g.slices[g.which[rank]].nbytes * g.count));
      return [swatch(k), kind, num(d3.format(",")(sum(of.map((g) => g.count)))), num(size(nbytes)), num(`${(100 * nbytes / all).toFixed(2)} %`), num(size(held))];
    }).filter((_, k) => groups.some((g) => g.kind === k));
    fill($("kinds").tHead, [["", "kind", num("tensors"), num("bytes of the model"), num("share"), num(`bytes of rank ${rank}`)]], "th");
    fill($("kinds").tBodies[0], rows);
  }

  function showParts() {
    const shown = files.slice(0, 512);
    fill($("parts").tHead, [["file", "holder", num("part"), num("tensors"), num("header"), num("bytes")]], "th");
    fill($("parts").tBodies[0], shown.map((file) => [
      file.name, holderName(file.holder), num(String(bars[file.holder].files.findIndex((one) => one.file === file))), num(d3.format(",")(orders[file.order].length)),
      num(size(file.start)), num(exact(file.nbytes)),
    ]));
    if (files.length > shown.length) fill($("parts").createTFoot(), [[`and ${d3.format(",")(files.length - shown.length)} more files`]]);
  }

  function swatch(k) {
    const one = document.createElement("canvas");
    one.width = 52;
    one.height = 30;
    one.style.cssText = "width:26px;height:15px;border:1px solid var(--line);border-radius:3px;display:block";
    one.setAttribute("aria-hidden", "true");
    const c = one.getContext("2d");
    c.scale(2, 2);
    c.fillStyle = palette.kinds[k];
    c.fillRect(0, 0, 26, 15);
    return { node: one };
  }
  function drawLegend() {
    $("legend").replaceChildren(...kinds.map((kind, k) => {
      const li = document.createElement("li");
      li.append(swatch(k).node, kind);
      return li;
    }).filter((_, k) => groups.some((g) => g.kind === k)));
    if ($("kinds").tBodies[0].rows.length) showKinds();
  }

  // ---- The table of tensors: only rows that are seen exist ---------------------------------------------------------
  const ROW = 27;
  const lower = names.map((name) => name.toLowerCase());
  const columns = [
    ["tensor", (t) => t, "name"], ["dtype", (t) => groups[groupOf[t]].dtype, ""], ["shape", (t) => groups[groupOf[t]].nbytes, ""],
    ["kind", (t) => groups[groupOf[t]].kind, ""], ["bytes", (t) => groups[groupOf[t]].nbytes, "number"],
    ["bytes of rank", (t) => sliceOf(t, rankNow()).nbytes, "number"], ["aligned to", (t) => alignedIn(t), "number"],
  ];
  let listed = d3.range(names.length), sorted = { column: 0, falling: false };
  function alignedIn(t) {
    const h = rankNow(), found = place(h, t) || (numHolders > numRanks ? place(numRanks, t) : null);
    if (!found) return 0;
    const one = bars[place(h, t) ? h : numRanks].files[found[0]];
    return alignmentOf(startIn(one, found[1]));
  }
  function refresh() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), kind = $("kind").value;
    listed = d3.range(names.length).filter((t) => words.every((word) => lower[t].includes(word)) && (kind === "" || groups[groupOf[t]].kind === Number(kind)));
    if (sorted.column || sorted.falling) {
      const key = columns[sorted.column][1], keys = new Map(listed.map((t) => [t, key(t)]));
      listed.sort((a, b) => d3.ascending(keys.get(a), keys.get(b)) * (sorted.falling ? -1 : 1) || a - b);
    }
    $("found").textContent = `${plural(listed.length, "tensor")} of ${d3.format(",")(names.length)}`;
    $("grid").setAttribute("aria-rowcount", listed.length + 1);
    $("grid-space").style.height = `${listed.length * ROW}px`;
    $("grid-body").style.height = `${Math.min(17, Math.max(1, listed.length)) * ROW}px`;
    $("grid-body").scrollTop = 0;
    showRows();
  }
  function showRows() {
    const body = $("grid-body"), first = Math.max(0, Math.floor(body.scrollTop / ROW) - 4), last = Math.min(listed.length, first + Math.ceil(body.clientHeight / ROW) + 8);
    const current = selected ? orders[bars[selected.h].files[selected.f].file.order][selected.i] : -1;
    $("grid-space").replaceChildren(...d3.range(first, last).map((n) => {
      const t = listed[n], g = groups[groupOf[t]], part = sliceOf(t, rankNow()), row = document.createElement("div");
      row.className = "tensor";
      row.setAttribute("role", "row");
      row.setAttribute("aria-rowindex", n + 2);
      row.setAttribute("aria-selected", t === current);
      row.style.top = `${n * ROW}px`;
      row.dataset.tensor = t;
      const aligned = alignedIn(t);
      const cells = [names[t], g.dtype, shapeOf(g.shape), kinds[g.kind], size(g.nbytes), part.is_held ? size(part.nbytes) : "-", aligned ? size2(aligned) : "-"];
      row.append(...cells.map((text, k) => {
        const cell = document.createElement("span");
        cell.setAttribute("role", "gridcell");
        cell.className = columns[k][2];
        cell.textContent = text;
        if (k === 0) cell.title = text;
        return cell;
      }));
      return row;
    }));
  }
  const size2 = (n) => (n >= 2 ** 21 ? "2 MiB+" : n >= 2 ** 20 ? `${n / 2 ** 20} MiB` : n >= 1024 ? `${n / 1024} KiB` : `${n} B`);
  function choose(t) {
    const h = rankNow(), found = place(h, t);
    if (found) select(h, ...found, true);
    else if (numHolders > numRanks && place(numRanks, t)) select(numRanks, ...place(numRanks, t), true);
    else { const other = bars.findIndex((_, r) => place(r, t)); if (other >= 0) select(other, ...place(other, t), true); }
  }
  $("grid-head").append(...columns.map(([title, , className], k) => {
    const cell = document.createElement("span"), button = document.createElement("button");
    cell.setAttribute("role", "columnheader");
    cell.className = className === "number" ? className : "";
    button.type = "button";
    button.textContent = title;
    button.onclick = () => {
      sorted = { column: k, falling: sorted.column === k ? !sorted.falling : className === "number" };
      [...$("grid-head").children].forEach((one, n) => one.setAttribute("aria-sort", n === k ? (sorted.falling ? "descending" : "ascending") : "none"));
      refresh();
    };
    cell.append(button);
    return cell;
  }));
  let waiting = 0;
  $("search").oninput = () => { clearTimeout(waiting); waiting = setTimeout(refresh, 60); };
  $("kind").onchange = refresh;
  $("grid-body").onscroll = showRows;
  $("grid-space").onclick = (event) => { const one = event.target.closest(".tensor"); if (one) choose(Number(one.dataset.tensor)); };
  $("grid").onkeydown = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (!by || event.target.closest("button")) return;
    event.preventDefault();
    const current = selected ? orders[bars[selected.h].files[selected.f].file.order][selected.i] : -1;
    const n = Math.max(0, Math.min(listed.length - 1, listed.indexOf(current) + by));
    if (!listed.length) return;
    choose(listed[n]);
    const body = $("grid-body"), y = n * ROW;
    if (y < body.scrollTop) body.scrollTop = y;
    else if (y + ROW > body.scrollTop + body.clientHeight) body.scrollTop = y + ROW - body.clientHeight;
  };

  // ---- Words ------------------------------------------------------------------------------------------------------
  function showWords() {
    const rank = ranks[0], made = content.converted;
    const model = content.model_type ? `, model type ${content.model_type}` : "";
    const what = made ? `converted for ${plural(numRanks, "rank")}` : `forecast of a conversion to ${plural(numRanks, "rank")}; nothing was converted`;
    $("subtitle").textContent = `${what}${model}, plan ${content.plan}${content.layout === "whole" ? ", layout whole" : ""}`;
    const times = (nbytes) => (nbytes / Math.max(1, rank.nbytes)).toFixed(1);
    const seconds = (nbytes) => `${+(nbytes / 1e9).toPrecision(2)} s`;
    $("answer").textContent = numRanks === 1
      ? `The one rank reads ${size(rank.nbytes)} in ${plural(bars[0].files.length, "file")}.`
      : `Rank 0 of ${numRanks} needs ${size(rank.nbytes)}. From the plain checkpoint a loader that slices rows reads ${size(rank.by_rows_nbytes)} (${times(rank.by_rows_nbytes)}x), ` +
        `one that reads whole shards ${size(content.whole_nbytes)} (${times(content.whole_nbytes)}x). ${made ? "From this folder" : "After the conversion"} relayout reads ${size(rank.nbytes)}` +
        `${made && content.reads ? ` in ${plural(content.reads[0], "read")}` : ""}. At 1 GB/s: ${seconds(rank.nbytes)} instead of ${seconds(rank.by_rows_nbytes)} or ${seconds(content.whole_nbytes)}.` +
        (content.layout === "whole" ? " Ranks share the files of whole tensors; their own files have what is not contiguous there." : "");
    const stored = sum(files.map((file) => file.nbytes)), model_nbytes = sum(groups.map((g) => g.nbytes * g.count));
    const nbytes = ranks.map((one) => one.nbytes);
    const facts = [
      ["tensors", d3.format(",")(names.length)], ["model", size(model_nbytes)], ["stored", `${size(stored)} (${(stored / Math.max(1, model_nbytes)).toFixed(3)}x)`],
      ["files", d3.format(",")(files.length)], ["parts of a rank", String(d3.max(bars, (one) => one.files.length))], ["alignment", size2(content.alignment)],
      ["replicated", size(sum(files.map((file) => file.nbytes - file.start)) - model_nbytes)], ["balance (average over largest)", (sum(nbytes) / numRanks / Math.max(1, d3.max(nbytes))).toFixed(4)],
      ["plain checkpoint", plural(shards.length, "file")],
    ];
    $("facts").replaceChildren(...facts.map(([term, text]) => pair(term, text)));
    $("made").textContent = `Made by relayout${made ? ` of a folder written by ${content.generator}` : ""}. Sizes are decimal (1 GB = 10^9 bytes). The page is complete: it loads nothing.`;
  }

  // ---- Start ------------------------------------------------------------------------------------------------------
  $("rank").append(...ranks.map((_, r) => new Option(String(r), r)));
  $("kind").append(...kinds.map((kind, k) => new Option(kind, k)).filter((_, k) => groups.some((g) => g.kind === k)));
  $("rank").onchange = () => { showRank(); if (sorted.column >= 5) refresh(); };
  $("theme").onclick = () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; setTheme(); };
  dark.addEventListener("change", () => setTheme());
  addEventListener("beforeprint", () => setTheme("light"));
  addEventListener("afterprint", () => setTheme());
  addEventListener("resize", () => {
    const x = scale(), [from, to] = [x.invert(left), x.invert(width - 8)];
    extent();
    draw();
    showBytes(from, to); // The same bytes, at the new width.
    drawShards();
    showRows();
  });
  setTheme();
  extent();
  showWords();
  showMeasured();
  showRanks();
  showParts();
  showRank();
  refresh();
  document.body.dataset.ready = "yes";
})().catch((error) => {
  document.getElementById("subtitle").textContent = `This page could not be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
