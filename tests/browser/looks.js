// Questions that the tests ask of a page; evaluated in it before them.

window.looks = {
  // Elements below `root` whose content is wider than they are.
  overflowing: (root) => [...document.querySelectorAll(`${root} *`)].filter((e) => {
    const s = getComputedStyle(e);
    return e.offsetParent && s.overflow === "visible" && s.display !== "inline" && e.clientWidth > 0 &&
      e.scrollWidth > e.clientWidth + 1;
  }).map((e) => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`),

  // Texts below `root` whose contrast to what they stand on is under 4.5 (WCAG). Colours are painted on a canvas, so
  // that any notation becomes red, green and blue.
  faint: (root) => {
    const c = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      c.clearRect(0, 0, 1, 1);
      c.fillStyle = colour;
      c.fillRect(0, 0, 1, 1);
      return [...c.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (colour) => colour.slice(0, 3)
      .map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4))
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const under = (e) => {
      for (; e; e = e.parentElement) {
        const colour = rgba(getComputedStyle(e).backgroundColor);
        if (colour[3] > 250) return colour;
      }
      return [255, 255, 255];
    };
    const speaks = (e) => e.offsetParent && !e.closest(".dim, .request[data-phase=finished], .request[data-phase=waiting]") &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    return [...document.querySelectorAll(root)].flatMap((r) => [...r.querySelectorAll("*")]).filter(speaks).map((e) => {
      const a = luminance(rgba(getComputedStyle(e).color)), b = luminance(under(e));
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      return [`${e.tagName}.${e.className} ${e.textContent.slice(0, 20)}`, ratio];
    }).filter(([, ratio]) => ratio < 4.5);
  },

  // How many pairs of the page's parts lie on each other.
  overlaps: () => {
    const parts = [...document.querySelectorAll(".panel, header, #controls")].map((e) => e.getBoundingClientRect());
    return parts.flatMap((a, i) => parts.slice(i + 1).filter((b) =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
  },

  // The smallest text, in CSS pixels.
  smallest: () => Math.min(...[...document.querySelectorAll("p, small, b, code, span, li")]
    .filter((e) => e.offsetParent).map((e) => parseFloat(getComputedStyle(e).fontSize))),

  // What can be used and has no name for those who do not see it.
  nameless: () => [...document.querySelectorAll("button, select, input, [role=gridcell]")].filter((e) =>
    !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label"))).map((e) => e.outerHTML),

  // Each block's classes, letters, and the ends of its write and read marks in percent.
  cells: () => [...document.querySelectorAll(".block")].map((c) => [[...c.classList], c.querySelector(".own").textContent,
    ["--w0", "--w1", "--r0", "--r1"].map((v) => parseFloat(c.style.getPropertyValue(v)))]),

  chips: () => [...document.querySelectorAll(".request")].map((r) =>
    [...r.querySelectorAll(".chip")].map((c) => c.textContent)),

  // Everything that is played back, a row a step, an entry a group of layers.
  played: () => run.states.map((s) => run.groups.map((g) => ({
    owned: [...s.owned[g.name]],
    cached: [...s.cached[g.name]].sort((a, b) => a - b),
    slots: s.step.rows.flatMap((r) => writtenSlots(run, s, g, r)),
    figures: stepFigures(run, s, g),
  }))),

  frame: () => new Promise((done) => requestAnimationFrame(() => setTimeout(done))),

  // Draw `n` steps, one a frame; milliseconds that took.
  scrub: (n) => new Promise((done) => {
    const began = performance.now();
    let i = 0;
    const draw = () => {
      go(i % run.steps.length);
      if (++i < n) requestAnimationFrame(draw);
      else done(performance.now() - began);
    };
    requestAnimationFrame(draw);
  }),
};
