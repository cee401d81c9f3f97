// Five views of the selected token, drawn from the run's own data.

// A node from a list: [tag.class, ...children]; strings are text.
function make([tag, ...children]) {
  const [name, ...classes] = tag.split(".");
  const node = element(name, classes.join(" "));
  for (const child of children) {
    if (child === null || child === undefined) continue;
    if (Array.isArray(child)) node.append(make(child));
    else if (child instanceof Node) node.append(child);
    else node.append(String(child));
  }
  return node;
}

const box = (kind, name, value, note) => [`div.box.${kind}`, ["small", name], ["b", value], note ? ["span.note", note] : null];
const arrow = (text) => ["div.arrow", text ? ["span", text] : null];
const flow = (...parts) => ["div.flow", ...parts];

const FIGURES = [
  { name: "Execution and memory", draw: figureMemory },
  { name: "Write path", draw: figureWrite },
  { name: "Pack assignment", draw: figurePacks },
  { name: "Read path", draw: figureRead },
  { name: "End to end", draw: figureFlow },
];

function drawFigure(run, state, g, view, position, panel) {
  const r = run.requests[view.request], figure = FIGURES[view.figure];
  const key = [run.tile, view.figure, view.step, view.request, position, view.group, view.part].join();
  if (panel.drawn === key) return;
  panel.drawn = key;
  panel.setAttribute("aria-label", figure.name);
  const blocks = state.owned[g.name].get(view.request) || [];
  const at = { run, state, g, view, r, blocks, position, row: rowOf(state, view.request), slot: position === null ? null : slotOf(blocks, position, run.block_size) };
  const parts = figure.draw(at);
  panel.replaceChildren(...parts.map(make));
}

const nothing = (at) => [["p.quiet", `${labelOf(at.r)} holds nothing in this step; choose another step or request.`]];

// 1. Who does the work, and how far the bytes travel.
function figureMemory({ run, state, g, row, r }) {
  const f = stepFigures(run, state, g), layers = g.layers.length, group = run.num_q_heads / g.num_kv_heads;
  const tokens = state.step.rows.reduce((n, x) => n + x.count, 0), sequences = state.step.rows.length;
  const tileBytes = run.tile * (g.head_size + g.head_size_v) * run.itemsize;
  const pool = g.num_blocks * run.block_size * tokenBytes(run, g);
  const keys = row ? readRange(g, row)[1] - readRange(g, row)[0] : 0;
  const rung = (level, who, what, size) => ["li.rung", ["small", level], ["b", who], ["span", what], size ? ["code", size] : null];
  return [
    ["p.lead", `This step, ${plural(layers, "layer")} of group ${g.name}: ${plural(tokens, "token")} of ${plural(sequences, "sequence")} written, then attended to.`],
    ["div.two",
      ["div", ["h3", "Execution"], ["ol.ladder",
        rung("launch", `${layers} × (write, attend)`, "one of each a layer", null),
        rung("write", `${plural(tokens, "row")}`, `a token's ${g.num_kv_heads} heads of ${g.head_size}, K and V`, bytes(tokenBytes(run, g) / layers)),
        rung("attend", `${plural(sequences * g.num_kv_heads, "question")}`, `sequence × KV head, ${group} query heads each`, null),
        rung("tile", row ? `${plural(Math.ceil(keys / run.tile), "tile")} for ${labelOf(r)}` : "tiles", `${run.tile} keys at a time`, bytes(tileBytes)),
        rung("lane", `${Math.min(32, Math.ceil((g.head_size * run.itemsize) / 16))} packs of 16 B`, `one head's row of ${g.head_size * run.itemsize} bytes`, null)]],
      ["div", ["h3", "Memory"], ["ol.ladder.memory",
        rung("pool", bytes(pool), `${g.num_blocks} blocks of ${run.block_size}, all layers`, null),
        rung("live", bytes(f.live * run.block_size * tokenBytes(run, g)), `${f.live} blocks`, null),
        rung("read", bytes(f.readBytes), `${f.read} tokens attended to, each sequence's once`, null),
        rung("written", bytes(f.writtenBytes), plural(f.written, "token"), null),
        rung("kept", `${(g.head_size_v + 2) * 4} B a query row`, `m, l and ${g.head_size_v} of acc, float32`, null)]]],
    ["p.note", f.written ? `For each byte written, ${(f.readBytes / f.writtenBytes).toFixed(1)} bytes are read.` : "Nothing is written in this step."],
  ];
}

// 2. From the token's row to its bytes.
function figureWrite(at) {
  const { run, state, g, r, blocks, position, slot, row } = at;
  if (slot === null) return nothing(at);
  const size = run.block_size, block = Math.floor(slot / size), offset = slot % size;
  const index = row && position >= row.first && position < row.first + row.count ? position - row.first : null;
  const packedRow = index === null ? null : state.step.rows.slice(0, state.step.rows.indexOf(row)).reduce((n, x) => n + x.count, 0) + index;
  const stored = index === null ? null : writtenSlots(run, state, g, row)[index];
  const when = index === null ? "stored in an earlier step" : stored < 0 ? "computed again, not stored (slot −1)" : `row ${packedRow} of this step`;
  const [sb, st, sh] = g.k_strides;
  const cells = Array.from({ length: size }, (_, i) => [`span.cell${i === offset ? ".write" : ""}`, i === offset ? i : ""]);
  return [
    flow(
      box("", "token", tokenText(r, position) || `position ${position}`, when),
      arrow(index === null ? "" : "slot_mapping"),
      box("write", index === null ? "slot" : `slot_mapping[${packedRow}]`, stored !== null && stored < 0 ? -1 : slot, `position ${position}`),
      arrow(`÷ ${size}`),
      box("", "block", block, `${slot} div ${size}`), box("", "offset", offset, `${slot} mod ${size}`),
      arrow("strides"),
      box("write", "K, head 0", address(run, g, slot, 0), `${block}·${sb} + ${offset}·${st} elements × ${run.itemsize} B`),
      box("write", "V, head 0", address(run, g, slot, 0, g.v_strides), `its own base and strides`)),
    ["div.block-picture", ["small", `block ${block}, offset ${offset} of ${size}`], ["div.cells", ...cells]],
    ["p.note", run.layout === "NHD" || g.num_kv_heads === 1
      ? `${run.layout}: the ${g.num_kv_heads} heads of a token are neighbours (head stride ${sh} elements), so a token is one span of ${g.num_kv_heads * g.head_size * run.itemsize} bytes.`
      : `${run.layout}: heads are ${sh * run.itemsize} bytes apart, so a token is written a head at a time, ${g.head_size * run.itemsize} bytes each.`],
  ];
}

// 3. One head's row, cut into packs for lanes, over the sectors that memory moves.
function figurePacks(at) {
  const { run, g, slot } = at;
  if (slot === null) return nothing(at);
  const start = address(run, g, slot, 0), from = start % 32;
  const packs = packed(g.head_size, run.itemsize, from), single = scalar(g.head_size, run.itemsize, from);
  const sectors = new Set(packs.flatMap(sectorsOf)).size, total = g.head_size * run.itemsize;
  let lane = 0;
  const cells = packs.flatMap((i) => i.addresses.map((a) => [`span.pack.${i.part}`, ["b", i.part === "body" ? lane++ % 32 : "·"], ["small", a - from + (i.width > 1 ? `–${a - from + i.width - 1}` : "")]]));
  const line = (name, list) => ["tr", ["th", name], ["td", list.length], ["td", Math.max(...list.map((i) => i.addresses.length))], ["td", `${Math.max(...list.map((i) => i.width))} B`], ["td", list.reduce((n, i) => n + sectorsOf(i).length, 0)]];
  return [
    ["p.lead", `K of head 0 at slot ${slot}: ${g.head_size} × ${run.itemsize} = ${total} bytes from byte ${start}, in ${plural(sectors, "sector")} of 32.`],
    ["div.packs", ...cells],
    ["table", ["thead", ["tr", ["th", ""], ["th", "instructions"], ["th", "lanes"], ["th", "a lane"], ["th", "sectors"]]],
      ["tbody", line("packs of 16 bytes", packs), line("one element a lane", single)]],
    ["p.note", "A sector counts once an instruction, however many lanes touch it: packs save instructions, not bytes."],
  ];
}

// 4. From the query through the table to the keys, and what is kept on the way.
function figureRead(at) {
  const { run, g, r, blocks, row, view } = at;
  if (!row) return nothing(at);
  const tiles = tilesOf(run, g, blocks, row);
  const steps = tiles.map((tile, i) => [`li.step${view.part === i + 1 ? ".current" : ""}`,
    ["small", `tile ${i}`],
    ["div.lookups", ...tile.columns.map((c, n) => ["span.lookup-chip", ["small", `[${c}]`], ["b", tile.blocks[n] === RELEASED ? "–" : tile.blocks[n]]])],
    ["span.keys", `keys ${tile.first} to ${tile.last - 1}`],
    ["code", i ? "m' = max(m, s), acc·α + p·V" : "m = max s, l = Σp, acc = p·V"]]);
  return [
    flow(
      box("", "query", plural(row.count, "row"), `position ${row.first}${row.count > 1 ? ` to ${row.first + row.count - 1}` : ""} of ${labelOf(r)}`),
      arrow("block_table"),
      box("lookup", "entries", plural(tiles.flatMap((t) => t.columns).filter((c, i, all) => all.indexOf(c) === i).length, "block"), "a position's block is table[position div block size]"),
      arrow("K, V"),
      box("read", "read", plural(readRange(g, row)[1] - readRange(g, row)[0], "token"), g.window === null ? "itself and all that came before" : `a window of ${g.window}`)),
    ["ol.walk", ...steps, ["li.step.end", ["small", "end"], ["code", "out = acc / l"], ["code", "lse = m + ln l"]]],
    ["p.note", "α = exp(m − m') rescales what was kept when a tile brings a larger score; splits of the keys each start from nothing and are added in the same way."],
  ];
}

// 5. A step from text to text.
function figureFlow(at) {
  const { run, state, g, r, row, view } = at;
  if (!row) return nothing(at);
  const length = row.first + row.count, next = length < r.tokens.length ? tokenText(r, length) : null;
  const slots = writtenSlots(run, state, g, row), prompt = row.first < r.prompt_tokens;
  return [
    flow(
      box("", prompt ? "prompt" : "last token", tokenText(r, length - 1) || length - 1, plural(row.count, "new token")),
      arrow("model"),
      box("", "q, k, v", `${run.num_q_heads} / ${g.num_kv_heads} heads`, `of ${g.head_size}, in ${plural(g.layers.length, "layer")}`),
      arrow("slot_mapping"),
      box("write", "write", slots.length > 1 ? `${plural(slots.filter((s) => s >= 0).length, "slot")}` : `slot ${slots[0] < 0 ? "−1" : slots[0]}`, bytes(slots.filter((s) => s >= 0).length * tokenBytes(run, g))),
      arrow("block_table"),
      box("read", "attend", `${plural(length - readRange(g, row)[0], "token")}`, bytes((length - readRange(g, row)[0]) * tokenBytes(run, g))),
      arrow("logits"),
      box("", "next token", next === null ? "the answer ends" : length >= r.prompt_tokens ? next : "the prompt goes on", `step ${view.step}`)),
    ["p.said", ["span.prompt", r.texts.slice(0, Math.min(length, r.prompt_tokens)).join("")], ["span.answer", r.texts.slice(r.prompt_tokens, length).join("")], ["mark", length >= r.prompt_tokens && next !== null ? r.texts[length] ?? "" : ""]],
    ["p.note", `In the ops of this step: ${state.step.writeMs.toFixed(2)} ms writing, ${state.step.attendMs.toFixed(2)} ms attending, of ${((state.step.ended - state.step.began) * 1000).toFixed(1)} ms.`],
  ];
}
