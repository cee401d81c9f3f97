// Playing a recorded run back: the twin of pagetile/inspect/run.py and figures.py. No drawing here.

const RELEASED = -1;

function decode(data) {
  const run = { ...data, steps: data.steps.map(decodeStep) };
  run.states = [...states(run)];
  return run;
}

function decodeStep(s) {
  const [began, ended, writeMs, attendMs] = s.t;
  return {
    began, ended, writeMs, attendMs,
    rows: s.rows.map(([request, first, count, skip]) => ({ request, first, count, skip })),
    blocks: s.blocks || {}, cached: s.cached || {}, copies: s.copies || [], events: s.events || [], slots: s.slots || {},
  };
}

// One state a step; rows that did not change are shared between states.
function* states(run) {
  let owned = Object.fromEntries(run.groups.map((g) => [g.name, new Map()]));
  let cached = Object.fromEntries(run.groups.map((g) => [g.name, new Set()]));
  const phase = new Map(); // request -> waiting, running, preempted or its finish reason
  for (const [index, step] of run.steps.entries()) {
    owned = { ...owned };
    for (const [group, changes] of Object.entries(step.blocks)) {
      const rows = new Map(owned[group]);
      for (const [request, first, blocks, length] of changes) {
        const old = rows.get(request) || [];
        const row = [...old.slice(0, first), ...blocks, ...old.slice(first + blocks.length)].slice(0, length);
        if (row.length) rows.set(request, row);
        else rows.delete(request);
      }
      owned[group] = rows;
    }
    cached = { ...cached };
    for (const [group, [came, went]] of Object.entries(step.cached)) {
      const kept = new Set(cached[group]);
      came.forEach((b) => kept.add(b));
      went.forEach((b) => kept.delete(b));
      cached[group] = kept;
    }
    for (const [kind, request, value] of step.events) {
      phase.set(request, kind === "finish" ? value : kind === "preempt" ? "preempted" : "running");
    }
    for (const row of step.rows) phase.set(row.request, "running");
    yield { index, step, owned, cached, phase: new Map(phase) };
  }
}

// Block -> requests that hold it, in order of requests' rows.
function owners(state, group) {
  const found = new Map();
  for (const [request, row] of state.owned[group]) {
    for (const block of row) {
      if (block === RELEASED) continue;
      if (found.has(block)) found.get(block).push(request);
      else found.set(block, [request]);
    }
  }
  return found;
}

const blocksFor = (tokens, size) => Math.ceil(tokens / size);

function firstVisible(g, position) {
  return g.window === null ? 0 : Math.max(0, position - g.window + 1);
}

// Positions [first, last) that a row's queries see, all of them together.
function readRange(g, row) {
  return [firstVisible(g, row.first), row.first + row.count];
}

function slotOf(blocks, position, size) {
  const block = blocks[Math.floor(position / size)];
  return block === undefined || block === RELEASED ? null : block * size + (position % size);
}

// Slots a row stores to, in order of its new tokens; -1 where one is computed and not stored.
function writtenSlots(run, state, g, row) {
  const given = state.step.slots[g.name];
  if (given) {
    const at = state.step.rows.slice(0, state.step.rows.indexOf(row)).reduce((n, r) => n + r.count, 0);
    return given.slice(at, at + row.count);
  }
  const blocks = state.owned[g.name].get(row.request) || [];
  return Array.from({ length: row.count }, (_, i) =>
    i < row.skip ? -1 : slotOf(blocks, row.first + i, run.block_size) ?? -1);
}

function tokenBytes(run, g) {
  return g.layers.length * g.num_kv_heads * (g.head_size + g.head_size_v) * run.itemsize;
}

// What a step wrote, looked up and read; the twin of step_figures.
function stepFigures(run, state, g) {
  let written = 0, lookedUp = 0, read = 0;
  for (const row of state.step.rows) {
    const [first, last] = readRange(g, row);
    read += last - first;
    lookedUp += blocksFor(last, run.block_size) - Math.floor(first / run.block_size);
    written += writtenSlots(run, state, g, row).filter((slot) => slot >= 0).length;
  }
  const live = owners(state, g.name).size, cached = state.cached[g.name].size;
  return {
    written, lookedUp, read,
    writtenBytes: written * tokenBytes(run, g), readBytes: read * tokenBytes(run, g),
    live, cached, free: g.num_blocks - live - cached,
  };
}

// The tiles of a row: keys [first, last) each, cut at multiples of the tile, with the table entries they look up.
function tilesOf(run, g, blocks, row) {
  const [first, last] = readRange(g, row);
  const tiles = [];
  for (let at = first - (first % run.tile); at < last; at += run.tile) {
    const lo = Math.max(first, at), hi = Math.min(last, at + run.tile);
    const columns = [];
    for (let c = Math.floor(lo / run.block_size); c < blocksFor(hi, run.block_size); c++) columns.push(c);
    tiles.push({ first: lo, last: hi, columns, blocks: columns.map((c) => blocks[c]) });
  }
  return tiles;
}

// What happens to each block in a step, as ranges of offsets: {write: [lo, hi), read: [lo, hi)}, and who looked it up.
function touched(run, state, g, only) {
  const found = new Map();
  const at = (block) => {
    if (!found.has(block)) found.set(block, { write: null, read: null, lookup: false });
    return found.get(block);
  };
  const widen = (range, lo, hi) => (range ? [Math.min(range[0], lo), Math.max(range[1], hi)] : [lo, hi]);
  const size = run.block_size;
  for (const row of state.step.rows) {
    if (only !== undefined && row.request !== only.request) continue;
    const blocks = state.owned[g.name].get(row.request) || [];
    if (!only || only.part === "all" || only.part === "write") {
      for (const slot of writtenSlots(run, state, g, row)) {
        if (slot < 0) continue;
        const mark = at(Math.floor(slot / size));
        mark.write = widen(mark.write, slot % size, (slot % size) + 1);
      }
    }
    if (only && only.part === "write") continue;
    let [first, last] = readRange(g, row);
    if (only && only.part !== "all") ({ first, last } = only.part);
    for (let c = Math.floor(first / size); c < blocksFor(last, size); c++) {
      const block = blocks[c];
      if (block === undefined || block === RELEASED) continue;
      const mark = at(block);
      mark.lookup = true;
      mark.read = widen(mark.read, Math.max(0, first - c * size), Math.min(size, last - c * size));
    }
  }
  return found;
}

// Tokens stored in a block by the end of a step, for the request that has stored most in it.
function usedIn(run, state, g) {
  const used = new Map();
  const lengths = new Map(state.step.rows.map((row) => [row.request, row.first + row.count]));
  for (const [request, row] of state.owned[g.name]) {
    const length = lengths.get(request) ?? run.requests[request].lengthAt?.[state.index] ?? 0;
    row.forEach((block, c) => {
      if (block === RELEASED) return;
      const here = Math.max(0, Math.min(run.block_size, length - c * run.block_size));
      used.set(block, Math.max(used.get(block) || 0, here));
    });
  }
  return used;
}

// Lengths of requests that hold blocks in a step without a row of their own (they wait for their turn).
function noteLengths(run) {
  const length = new Map();
  for (const state of run.states) {
    for (const [kind, request, value] of state.step.events) {
      if (kind === "admit") length.set(request, value);
      if (kind === "fork") length.set(request, length.get(value) || 0);
    }
    for (const row of state.step.rows) length.set(row.request, row.first + row.count);
    for (const [request, n] of length) (run.requests[request].lengthAt ??= [])[state.index] = n;
  }
}
