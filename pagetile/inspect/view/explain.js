// Words and numbers about one token: the twin of pagetile/inspect/explain.py, coalesce.py and of the CLI's lines.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const letterOf = (request) => LETTERS[request % LETTERS.length];
const hueOf = (request) => Math.round((request * 137.508 + 200) % 360);
const labelOf = (r) => (r.sample ? `${r.id}.${r.sample}` : r.id);

function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

function tokenText(r, position) {
  const text = r.texts[position];
  if (text !== undefined) return JSON.stringify(text);
  return r.tokens[position] === undefined ? "" : `token ${r.tokens[position]}`;
}

// First byte of a head at a slot, from the base of the K (or V) cache.
function address(run, g, slot, head, strides = g.k_strides) {
  const block = Math.floor(slot / run.block_size), offset = slot % run.block_size;
  return (block * strides[0] + offset * strides[1] + head * strides[2]) * run.itemsize;
}

function explainPosition(run, state, g, request, position) {
  const r = run.requests[request], size = run.block_size;
  const blocks = state.owned[g.name].get(request) || [];
  const logical = Math.floor(position / size), offset = position % size;
  const start = `${labelOf(r)}, position ${position} ${tokenText(r, position)}`.trim();
  const slot = slotOf(blocks, position, size);
  if (slot === null) return `${start}  →  logical block ${logical}, offset ${offset}  →  holds no block there now`;
  const first = address(run, g, slot, 0), last = first + g.head_size * run.itemsize - 1;
  return `${start}  →  logical block ${logical}, offset ${offset}  →  physical block ${blocks[logical]}  →  ` +
    `slot ${blocks[logical]} × ${size} + ${offset} = ${slot}  →  K of head 0 at bytes ${first} to ${last} (${run.layout})`;
}

function explainBlock(run, state, g, block, own, used) {
  if (!own || !own.length) return `block ${block}: ${state.cached[g.name].has(block) ? "cached, nobody holds it" : "free"}`;
  const who = own.map((request) => {
    const logical = state.owned[g.name].get(request).indexOf(block);
    const first = logical * run.block_size;
    return `${labelOf(run.requests[request])} as logical block ${logical} (positions ${first} to ${first + run.block_size - 1})`;
  });
  return `block ${block}, slots ${block * run.block_size} to ${(block + 1) * run.block_size - 1}: held by ` +
    `${who.join(", and by ")}; ${used || 0} of ${run.block_size} slots stored`;
}

// The lanes of one head's row: packs of 16 bytes with a scalar prefix and tail; the twin of coalesce.packed.
function packed(count, itemsize, at) {
  const pack = Math.max(1, Math.floor(16 / itemsize)), width = pack * itemsize;
  const prefix = Math.min(count, Math.floor(((width - (at % width)) % width) / itemsize));
  const packs = Math.floor((count - prefix) / pack), tail = (count - prefix) % pack;
  return lanes([[1, 0, prefix, "prefix"], [pack, prefix, packs, "body"], [1, count - tail, tail, "tail"]], itemsize, at);
}

function scalar(count, itemsize, at) {
  return lanes([[1, 0, count, "body"]], itemsize, at);
}

function lanes(parts, itemsize, at) {
  const found = [];
  for (const [pack, first, n, part] of parts) {
    for (let start = 0; start < n; start += 32) {
      const addresses = [];
      for (let i = 0; i < Math.min(32, n - start); i++) addresses.push(at + (first + (start + i) * pack) * itemsize);
      found.push({ part, width: pack * itemsize, addresses });
    }
  }
  return found;
}

function sectorsOf(instruction) {
  const found = new Set();
  for (const a of instruction.addresses) {
    for (let s = Math.floor(a / 32); s <= Math.floor((a + instruction.width - 1) / 32); s++) found.add(s);
  }
  return [...found].sort((a, b) => a - b);
}
