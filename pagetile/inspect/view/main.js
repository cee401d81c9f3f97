// Controls, keys, and the one function that shows a step.

const run = decode(JSON.parse(document.getElementById("run").textContent));
noteLengths(run);
const $ = (id) => document.getElementById(id);
const view = { step: 0, group: run.groups[0].name, request: 0, part: -1, position: null, zoom: 2, figure: 0, timer: 0, shown: 0 };
const ZOOMS = [3, 4.2, 5.6, 8, 11];

const groupNow = () => run.groups.find((g) => g.name === view.group);
const stateNow = () => run.states[view.step];

// The token that the figures speak of: the one chosen, else the last new one of the selected request.
function tokenNow(state) {
  const g = groupNow(), row = rowOf(state, view.request), blocks = state.owned[g.name].get(view.request) || [];
  const length = row ? row.first + row.count : Math.min(blocks.length * run.block_size, run.requests[view.request].lengthAt?.[view.step] ?? 0);
  if (!length) return null;
  return Math.max(0, Math.min(length - 1, view.position ?? length - 1));
}

function show() {
  const state = stateNow(), g = groupNow();
  if (!state) return;
  view.part = Math.min(view.part, partsOf(run, state, g, view.request) - 1);
  $("step").value = view.step;
  moveHand(run, $("timeline"), view.step);
  drawRequests(run, state, g, view, $("request-list"));
  drawPool(run, state, g, view, $("pool-grid"), $("pool-counts"));
  drawTiles(run, state, g, view, $("tiles-of"), $("tiles-body"), (part) => { view.part = part; show(); });
  unlessHurried(() => drawFigure(run, stateNow(), groupNow(), view, tokenNow(stateNow()), $("figure")));
  const f = stepFigures(run, state, g), s = state.step;
  $("now").textContent = `step ${view.step} of ${run.steps.length - 1} · ${s.began.toFixed(3)} s, ${((s.ended - s.began) * 1000).toFixed(1)} ms · ` +
    `${plural(s.rows.length, "sequence")}, ${plural(s.rows.reduce((n, r) => n + r.count, 0), "new token")} · ` +
    `written ${bytes(f.writtenBytes)}, read ${bytes(f.readBytes)}`;
  const position = tokenNow(state);
  say(position === null ? `${labelOf(run.requests[view.request])} holds nothing in this step` : explainPosition(run, state, g, view.request, position));
  clearTimeout(view.hash);
  view.hash = setTimeout(() => history.replaceState(null, "", `#step=${view.step}&request=${view.request}`), 300);
}

// At once, or when the steps stop flying by: nobody reads a figure that stands for a thirtieth of a second.
function unlessHurried(draw) {
  const now = performance.now(), hurried = now - view.shown < 60;
  view.shown = now;
  clearTimeout(view.later);
  if (hurried) view.later = setTimeout(draw, 80);
  else draw();
}

function say(line) {
  if ($("explain").textContent !== line) $("explain").textContent = line;
}

function go(step) {
  view.step = Math.max(0, Math.min(run.steps.length - 1, step));
  show();
}

function select(request) {
  view.request = (request + run.requests.length) % run.requests.length;
  view.part = -1;
  view.position = null;
  show();
  $("request-list").children[view.request].scrollIntoView({ block: "nearest" });
}

function play(on) {
  clearInterval(view.timer);
  view.timer = 0;
  if (on) {
    if (view.step === run.steps.length - 1) go(0);
    const walking = $("speed").value === "tiles";
    view.timer = setInterval(() => {
      const last = view.step >= run.steps.length - 1;
      if (walking && (!last || view.part < partsOf(run, stateNow(), groupNow(), view.request) - 1)) movePart(1);
      else if (last) play(false);
      else go(view.step + 1);
    }, walking ? 600 : 1000 / Number($("speed").value));
  }
  $("play").textContent = on ? "❚❚ pause" : "▶ play";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

// Parts of the selected row: the write, then each tile; past the last one the next step's.
function movePart(by) {
  const parts = partsOf(run, stateNow(), groupNow(), view.request), next = view.part + by;
  if (next >= -1 && next < parts) {
    view.part = next;
    show();
  } else if (view.step + by >= 0 && view.step + by < run.steps.length) {
    view.part = by > 0 ? 0 : partsOf(run, run.states[view.step - 1], groupNow(), view.request) - 1;
    go(view.step + by);
  }
}

function moveToken(by) {
  const at = tokenNow(stateNow());
  if (at === null) return;
  view.position = Math.max(0, at + by);
  view.position = tokenNow(stateNow());
  show();
}

function zoom(by) {
  view.zoom = Math.max(0, Math.min(ZOOMS.length - 1, view.zoom + by));
  $("pool-grid").style.setProperty("--cell", `${ZOOMS[view.zoom]}rem`);
}

function theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

function pickGroup(name) {
  view.group = name;
  makePool(run, groupNow(), $("pool-grid"), $("pool-rest"));
  drawTimeline(run, groupNow(), $("timeline"));
  show();
}

// Hovering (or focusing) anything that stands for a block explains it and lights it up everywhere.
function light(event) {
  const target = event.target.closest?.("[data-block]");
  document.querySelectorAll(".lit").forEach((node) => node.classList.remove("lit"));
  if (!target) return;
  const state = stateNow(), g = groupNow(), block = Number(target.dataset.block);
  document.querySelectorAll(`[data-block="${block}"]`).forEach((node) => node.classList.add("lit"));
  if (target.classList.contains("block") && event.clientX !== undefined && event.type === "pointermove") {
    const box = target.getBoundingClientRect(), offset = Math.floor(((event.clientX - box.left) / box.width) * run.block_size);
    say(explainSlot(state, g, block, Math.max(0, Math.min(run.block_size - 1, offset))));
  } else {
    say(explainBlock(run, state, g, block, owners(state, g.name).get(block), usedIn(run, state, g).get(block)));
  }
}

function explainSlot(state, g, block, offset) {
  const own = owners(state, g.name).get(block);
  if (!own) return `slot ${block * run.block_size + offset}: ${explainBlock(run, state, g, block)}`;
  const request = own.includes(view.request) ? view.request : own[0];
  const logical = state.owned[g.name].get(request).indexOf(block);
  return explainPosition(run, state, g, request, logical * run.block_size + offset);
}

function pickSlot(event) {
  const cell = event.target.closest(".block");
  if (!cell) return;
  const block = Number(cell.dataset.block), own = owners(stateNow(), view.group).get(block);
  if (!own) return;
  const box = cell.getBoundingClientRect();
  const offset = Math.max(0, Math.min(run.block_size - 1, Math.floor(((event.clientX - box.left) / box.width) * run.block_size)));
  const request = own.includes(view.request) ? view.request : own[0];
  const logical = stateNow().owned[view.group].get(request).indexOf(block);
  if (request !== view.request) view.part = -1;
  view.request = request;
  view.position = logical * run.block_size + offset;
  show();
}

// In the pool the arrows walk from block to block.
function walkPool(event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 0, ArrowDown: 0 };
  if (!(event.key in moves)) return;
  const grid = $("pool-grid"), cells = [...grid.children], here = cells.findIndex((c) => c.classList.contains("cursor"));
  const line = cells.filter((c) => c.offsetTop === cells[0].offsetTop).length;
  const by = { ArrowUp: -line, ArrowDown: line }[event.key] ?? moves[event.key];
  const next = here < 0 ? 0 : Math.max(0, Math.min(cells.length - 1, here + by));
  cells[here]?.classList.remove("cursor");
  cells[next].classList.add("cursor");
  cells[next].scrollIntoView({ block: "nearest" });
  grid.setAttribute("aria-activedescendant", cells[next].id);
  light({ target: cells[next], type: "focus" });
  event.preventDefault();
  event.stopPropagation();
}

const KEYS = {
  ArrowLeft: () => go(view.step - 1), ArrowRight: () => go(view.step + 1), Home: () => go(0), End: () => go(run.steps.length - 1),
  ArrowUp: () => select(view.request - 1), ArrowDown: () => select(view.request + 1),
  " ": () => play(!view.timer), ",": () => movePart(-1), ".": () => movePart(1), "[": () => moveToken(-1), "]": () => moveToken(1),
  "+": () => zoom(1), "=": () => zoom(1), "-": () => zoom(-1), t: theme, "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const field = event.target.matches("select, input:not([type=range])");
  const pressed = event.target.matches("button, [role=tab]") && event.target.offsetParent && event.key === " ";
  if (field || pressed) return;
  if (event.key >= "1" && event.key <= "5") pickFigure(Number(event.key) - 1);
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

function pickFigure(figure) {
  view.figure = figure;
  view.shown = 0;
  [...$("tabs").children].forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === figure);
    tab.tabIndex = i === figure ? 0 : -1;
  });
  show();
}

function start() {
  $("title").textContent = run.title;
  const g = run.groups[0];
  $("about").textContent = `${run.model || "a model"} · ${plural(run.requests.length, "request")} · ${plural(run.steps.length, "step")} · ` +
    `blocks of ${run.block_size} · ${run.num_q_heads}/${g.num_kv_heads} heads of ${g.head_size} · ${run.dtype} ${run.layout} · ${run.backend} backend`;
  $("step").max = Math.max(0, run.steps.length - 1);
  FIGURES.forEach(({ name }, i) => {
    const tab = element("button", "tab", `${i + 1} ${name}`);
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => pickFigure(i));
    $("tabs").append(tab);
  });
  if (run.groups.length > 1) {
    $("group-pick").hidden = false;
    run.groups.forEach((group) => $("group").append(new Option(`${group.name} (${plural(group.layers.length, "layer")})`, group.name)));
    $("group").addEventListener("change", () => pickGroup($("group").value));
  }
  const tiles = [...new Set([16, 32, 64, 128, 256, run.tile])].sort((a, b) => a - b);
  tiles.forEach((n) => $("tile").append(new Option(`${n} keys`, n, n === run.tile, n === run.tile)));
  $("tile").addEventListener("change", () => {
    run.tile = Number($("tile").value);
    view.part = -1;
    show();
  });
  makeRequests(run, $("request-list"), select);
  const asked = new URLSearchParams(location.hash.slice(1));
  view.step = Math.max(0, Math.min(run.steps.length - 1, Number(asked.get("step")) || 0));
  view.request = Math.max(0, Math.min(run.requests.length - 1, Number(asked.get("request")) || 0));
  for (const [id, action] of Object.entries({ first: KEYS.Home, back: KEYS.ArrowLeft, forward: KEYS.ArrowRight, last: KEYS.End, play: KEYS[" "], theme, smaller: KEYS["-"], larger: KEYS["+"], "help-open": KEYS["?"] })) {
    $(id).addEventListener("click", action);
  }
  $("speed").addEventListener("change", () => view.timer && play(true));
  $("step").addEventListener("input", () => go(Number($("step").value)));
  $("pool-grid").addEventListener("keydown", walkPool);
  $("pool-grid").addEventListener("click", pickSlot);
  document.addEventListener("pointermove", (event) => event.target.closest?.("[data-block]") && light(event));
  document.addEventListener("pointerout", (event) => event.target.closest?.("[data-block]") && light({ target: document.body }));
  zoom(0);
  if (!run.steps.length) {
    say("the run has no steps");
    return;
  }
  pickGroup(view.group);
  pickFigure(0);
}

start();
