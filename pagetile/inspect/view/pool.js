// The middle: every physical block, how full it is, whose it is, and what the step does to it.

const MOST_BLOCKS = 2048;

// Blocks worth drawing: all of a small pool, else up to the last one that anybody ever held.
function shownBlocks(run, g) {
  if (g.num_blocks <= 256) return g.num_blocks;
  let highest = 0;
  for (const state of run.states) {
    for (const row of state.owned[g.name].values()) for (const b of row) highest = Math.max(highest, b);
    for (const b of state.cached[g.name]) highest = Math.max(highest, b);
  }
  return Math.min(g.num_blocks, MOST_BLOCKS, Math.ceil((highest + 1) / 16) * 16);
}

function makePool(run, g, grid, rest) {
  const count = shownBlocks(run, g);
  grid.replaceChildren();
  grid.style.setProperty("--slots", run.block_size);
  for (let b = 0; b < count; b++) {
    const cell = element("div", "block");
    cell.setAttribute("role", "gridcell");
    cell.id = `block-${b}`;
    cell.dataset.block = b;
    cell.number = b;
    cell.append(element("b", "id", b), element("i", "own"));
    grid.append(cell);
  }
  const left = g.num_blocks - count;
  rest.textContent = left ? `Blocks ${count} to ${g.num_blocks - 1} are not drawn: nobody held them in this run.` : "";
}

function drawPool(run, state, g, view, grid, counts) {
  const own = owners(state, g.name), used = usedIn(run, state, g), size = run.block_size;
  const tile = currentTile(run, state, g, view);
  const only = tile ? { request: view.request, part: tile.write ? "write" : tile } : undefined;
  const marks = touched(run, state, g, only);
  const cached = state.cached[g.name];
  for (const cell of grid.children) {
    const b = cell.number, who = own.get(b) || [], mark = marks.get(b);
    const kind = who.length > 1 ? "shared" : who.length ? "live" : cached.has(b) ? "cached" : "free";
    const mine = who.includes(view.request);
    const key = [kind, who.join(), used.get(b) || 0, mark ? [mark.write, mark.read, mark.lookup].join("/") : "", mine].join("|");
    if (cell.drawn === key) continue;
    cell.drawn = key;
    cell.className = `block ${kind}${mine ? " mine" : ""}${mark?.write ? " write" : ""}${mark?.read ? " read" : ""}${mark?.lookup ? " lookup" : ""}`;
    const style = cell.style, percent = (n) => `${(100 * n) / size}%`;
    style.setProperty("--hue", who.length ? hueOf(who[0]) : 0);
    style.setProperty("--used", percent(used.get(b) || (kind === "cached" ? size : 0)));
    style.setProperty("--w0", percent(mark?.write ? mark.write[0] : 0));
    style.setProperty("--w1", percent(mark?.write ? mark.write[1] : 0));
    style.setProperty("--r0", percent(mark?.read ? mark.read[0] : 0));
    style.setProperty("--r1", percent(mark?.read ? mark.read[1] : 0));
    cell.lastChild.textContent = who.length > 3 ? `${letterOf(who[0])}+${who.length - 1}` : who.map(letterOf).join("");
    cell.setAttribute("aria-label", explainBlock(run, state, g, b, who, used.get(b)));
  }
  const f = stepFigures(run, state, g);
  counts.textContent = `${f.live} live, ${f.cached} cached, ${f.free} free of ${g.num_blocks}`;
  return own;
}

// The run at a glance: live and cached blocks over the steps, a mark where something happened.
function drawTimeline(run, g, svg) {
  const n = run.states.length, width = 1000, height = 60;
  const x = (i) => (n > 1 ? (i * width) / (n - 1) : 0);
  const live = run.states.map((s) => owners(s, g.name).size);
  const both = run.states.map((s, i) => live[i] + s.cached[g.name].size);
  const peak = Math.max(1, ...both);
  const y = (blocks) => height - (height - 8) * (blocks / peak);
  const area = (values) => `M0,${height} ` + values.map((v, i) => `L${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ") + ` L${width},${height} Z`;
  const marks = run.states.flatMap((s) => s.step.events.filter(([kind]) => kind === "preempt").map(() =>
    `<path class="mark" d="M${x(s.index).toFixed(1)},0 v${height}"/>`));
  svg.innerHTML = `<path class="both" d="${area(both)}"/><path class="live" d="${area(live)}"/>${[...new Set(marks)].join("")}<path class="hand" d="M0,0 v${height}"/>`;
}

function moveHand(run, svg, index) {
  const n = run.states.length;
  svg.querySelector(".hand").setAttribute("transform", `translate(${n > 1 ? (index * 1000) / (n - 1) : 0},0)`);
}
