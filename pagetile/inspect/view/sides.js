// Left: requests and their logical blocks. Right: the selected request's part of the step, tile after tile.

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function set(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

const PHASES = { running: "running", preempted: "preempted", waiting: "waiting", stop: "finished", length: "finished", abort: "aborted" };

// Tokens that every prompt begins with (a chat template): two lines of them would make all requests look the same.
function sharedBeginning(run) {
  const shortest = Math.min(...run.requests.map((r) => r.prompt_tokens)), [one, ...others] = run.requests;
  let n = 0;
  while (n < shortest && others.every((r) => r.tokens[n] === one.tokens[n])) n++;
  return others.length ? Math.max(0, Math.min(n, shortest - 12)) : 0;
}

function makeRequests(run, list, onSelect) {
  if (!run.requests.length) return;
  const skipped = sharedBeginning(run);
  run.requests.forEach((r, number) => {
    const item = element("li", "request");
    item.style.setProperty("--hue", hueOf(number));
    const head = element("button", "who");
    head.type = "button";
    head.append(element("span", "letter", letterOf(number)), element("span", "label", labelOf(r)), element("span", "phase"));
    head.addEventListener("click", () => onSelect(number));
    const rest = r.texts.slice(skipped, r.prompt_tokens).join("").trim();
    const prompt = rest ? (skipped ? `… ${rest}` : rest) : `${r.prompt_tokens} tokens`;
    const answer = r.texts.slice(r.prompt_tokens).join("");
    const said = element("p", "said");
    said.title = r.texts.join("");
    said.append(element("span", "prompt", prompt), " ", element("span", "answer", answer.trim()));
    item.append(head, said, element("ol", "chips"));
    list.append(item);
  });
}

function phaseOf(state, number) {
  return state.phase.get(number) || "waiting";
}

function drawRequests(run, state, g, view, list) {
  const rows = new Map(state.step.rows.map((row) => [row.request, row]));
  for (let number = 0; number < run.requests.length; number++) {
    const item = list.children[number], blocks = state.owned[g.name].get(number) || [];
    const phase = PHASES[phaseOf(state, number)] || phaseOf(state, number);
    set(item, "phase", phase);
    item.classList.toggle("selected", number === view.request);
    item.firstChild.setAttribute("aria-pressed", number === view.request);
    const label = item.querySelector(".phase"), text = rows.has(number) ? `${plural(rows.get(number).count, "new token")}` : phase;
    if (label.textContent !== text) label.textContent = text;
    drawChips(run, state, g, view, item.querySelector(".chips"), number, blocks, rows.get(number));
  }
}

// One chip a logical block: its physical id, how full it is, whether this step looks it up or writes it.
function drawChips(run, state, g, view, chips, number, blocks, row) {
  const size = run.block_size, length = run.requests[number].lengthAt?.[state.index] ?? 0;
  while (chips.children.length > blocks.length) chips.lastChild.remove();
  while (chips.children.length < blocks.length) chips.append(element("li", "chip"));
  const [first, last] = row ? readRange(g, row) : [0, 0];
  const tile = number === view.request ? currentTile(run, state, g, view) : null;
  blocks.forEach((block, c) => {
    const chip = chips.children[c], start = c * size;
    const full = Math.max(0, Math.min(1, (length - start) / size));
    const writes = row && block !== RELEASED && row.first + row.skip < start + size && row.first + row.count > start;
    let looked = row && block !== RELEASED && start < last && start + size > first;
    if (looked && tile) looked = tile.columns ? tile.columns.includes(c) : false;
    const key = `${block}|${full}|${writes ? 1 : 0}|${looked ? 1 : 0}`;
    if (chip.drawn === key) return;
    chip.drawn = key;
    chip.textContent = block === RELEASED ? "–" : block;
    chip.className = `chip${writes ? " write" : ""}${looked ? " lookup" : ""}${block === RELEASED ? " released" : ""}`;
    chip.style.setProperty("--full", `${full * 100}%`);
    set(chip, "block", String(block));
    set(chip, "logical", String(c));
    set(chip, "request", String(number));
  });
}

function rowOf(state, request) {
  return state.step.rows.find((row) => row.request === request);
}

// What the marks are limited to: null for the whole step, {write: true}, or one tile of the selected row.
function currentTile(run, state, g, view) {
  const row = rowOf(state, view.request);
  if (!row || view.part < 0) return null;
  if (view.part === 0) return { write: true };
  return tilesOf(run, g, state.owned[g.name].get(view.request) || [], row)[view.part - 1] || null;
}

function partsOf(run, state, g, request) {
  const row = rowOf(state, request);
  return row ? 1 + tilesOf(run, g, state.owned[g.name].get(request) || [], row).length : 0;
}

function drawTiles(run, state, g, view, title, body, onPart) {
  const r = run.requests[view.request], row = rowOf(state, view.request), blocks = state.owned[g.name].get(view.request) || [];
  title.textContent = `of ${labelOf(r)}`;
  body.replaceChildren();
  for (const [kind, request, value] of state.step.events) {
    const what = { admit: value ? `admitted, ${value} tokens found in the prefix cache` : "admitted", preempt: "lost its blocks (preempted)", finish: `finished (${value})`, fork: "forked" }[kind];
    body.append(element("p", `event ${kind}`, `${labelOf(run.requests[request])} ${what}`));
  }
  for (const [group, src, dst] of state.step.copies) {
    if (group === g.name) body.append(element("p", "event copy", `block ${src} is copied to ${dst} before it is written`));
  }
  if (!row) {
    const held = blocks.filter((b) => b !== RELEASED).length;
    body.append(element("p", "quiet", held ? `It holds ${plural(held, "block")} and has no turn in this step.` : `It holds no block in this step (${phaseOf(state, view.request)}).`));
    return;
  }
  const length = row.first + row.count;
  body.append(element("p", "row-of", `${plural(row.count, "new token")}, position ${row.first}${row.count > 1 ? ` to ${length - 1}` : ""}; attends to ${plural(length - readRange(g, row)[0], "token")}`));
  const all = element("ol", "parts");
  all.append(writePart(run, state, g, row, r));
  tilesOf(run, g, blocks, row).forEach((tile, i) => all.append(tilePart(run, tile, i)));
  [...all.children].forEach((part, i) => {
    part.classList.toggle("current", i === view.part);
    part.classList.toggle("dim", view.part >= 0 && i !== view.part);
    part.firstChild.addEventListener("click", () => onPart(i === view.part ? -1 : i));
    part.firstChild.setAttribute("aria-pressed", i === view.part);
  });
  body.append(all);
}

function writePart(run, state, g, row, r) {
  const part = element("li", "part write-part");
  const button = element("button", "part-name", "write");
  button.type = "button";
  part.append(button);
  const list = element("ul", "slots");
  writtenSlots(run, state, g, row).slice(0, 8).forEach((slot, i) => {
    const item = element("li", slot < 0 ? "slot skipped" : "slot");
    item.append(element("code", "", tokenText(r, row.first + i) || `row ${i}`), slot < 0 ? " is stored already: slot −1" : ` → slot ${slot}`);
    if (slot >= 0) item.dataset.block = Math.floor(slot / run.block_size);
    list.append(item);
  });
  if (row.count > 8) list.append(element("li", "slot more", `and ${row.count - 8} more`));
  part.append(list);
  return part;
}

function tilePart(run, tile, i) {
  const part = element("li", "part tile-part");
  const button = element("button", "part-name", `tile ${i}`);
  button.type = "button";
  part.append(button, element("span", "keys", `keys ${tile.first} to ${tile.last - 1}`));
  const list = element("ul", "lookups");
  tile.columns.forEach((column, n) => {
    const item = element("li", "lookup-chip");
    const block = tile.blocks[n];
    item.append(element("small", "", `[${column}]`), element("b", "", block === RELEASED || block === undefined ? "–" : block));
    const lo = Math.max(0, tile.first - column * run.block_size), hi = Math.min(run.block_size, tile.last - column * run.block_size);
    item.style.setProperty("--r0", `${(100 * lo) / run.block_size}%`);
    item.style.setProperty("--r1", `${(100 * hi) / run.block_size}%`);
    item.dataset.block = block;
    list.append(item);
  });
  part.append(list);
  return part;
}
