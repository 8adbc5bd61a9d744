// Redraws curves that the server drew: new points while a job runs, values under the pointer, and a range of steps that all charts share.
// Sizes are those of documents/charts.py.
const LEFT = 52, BOTTOM = 24, TOP = 10, RIGHT = 10, MOST = 800, LEAST_DRAG = 6;
const SVG = "http://www.w3.org/2000/svg", CHART = "svg[data-lines]";
let range = null; // first and last step shown; null: all

function short(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) >= 0.001 || value === 0 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);
}

const lines = (svg) => JSON.parse(svg.dataset.lines);
const charts = () => [...document.querySelectorAll(CHART)];
const lastStep = (found) => Math.max(1, ...found.flatMap((line) => line.points.map(([x]) => x)));

function domain(svg, found) {
  const { width, height } = svg.viewBox.baseVal, [first, last] = range ?? [0, lastStep(found)];
  const values = found.flatMap((line) => line.points).filter(([x]) => x >= first && x <= last).map(([, y]) => y);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  const space = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.01;
  return { low: low >= 0 ? Math.max(0, low - space) : low - space, high: high + space, first, last, width, height };
}

function place([x, y], { low, high, first, last, width, height }) {
  return [LEFT + ((x - first) / (last - first)) * (width - LEFT - RIGHT), TOP + ((high - y) / (high - low)) * (height - TOP - BOTTOM)];
}

function add(parent, tag, attributes) {
  const made = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function draw(svg, found = lines(svg)) {
  const shape = domain(svg, found), groups = svg.querySelectorAll("g");
  found.forEach(({ points }, i) => {
    const group = groups[i], path = group.querySelector("polyline"), letter = group.querySelector(".letter");
    const at = points.filter(([x]) => x >= shape.first && x <= shape.last).map((point) => place(point, shape));
    path.setAttribute("points", at.map((pair) => pair.map((n) => n.toFixed(1)).join(",")).join(" "));
    group.querySelectorAll("circle").forEach((dot) => dot.remove());
    if ("dots" in group.dataset) for (const [cx, cy] of at) add(group, "circle", { class: path.getAttribute("class").replace("line", "dot"), cx, cy, r: 3 });
    if (letter && at.length) { letter.setAttribute("x", at.at(-1)[0] - 4); letter.setAttribute("y", at.at(-1)[1] - 6); }
  });
  svg.querySelectorAll("text.y").forEach((text, tick) => { text.textContent = short(shape.low + ((shape.high - shape.low) * tick) / 4); });
  const steps = [shape.first, (shape.first + shape.last) / 2, shape.last];
  svg.querySelectorAll("text.x").forEach((text, i) => { const step = Math.round(steps[i]).toLocaleString("en"); text.textContent = i === 2 ? `step ${step}` : i === 1 && shape.last - shape.first < 2 ? "" : step; });
}

export function addPoint(step, values) {
  for (const svg of charts()) {
    const found = lines(svg);
    let isNew = false;
    found.forEach((line, i) => {
      const value = line.metric === "memory_bytes" ? values.memory_bytes / 2 ** 30 : values[line.metric];
      if (!Number.isFinite(value)) return;
      line.points = line.points.filter(([x]) => x < step).concat([[step, value]]);
      if (line.points.length > MOST) line.points = line.points.filter((_, at) => at % 2 === 0 || at === line.points.length - 1);
      isNew = true;
      if (i === 0) svg.closest("figure").querySelector("[data-value]").textContent = Number(value.toPrecision(4));
    });
    if (!isNew) continue;
    svg.dataset.lines = JSON.stringify(found);
    draw(svg, found);
  }
}

// The steps that are shown: by dragging over a chart, by the buttons, and back by a double click.
function show(next) {
  const last = Math.max(...charts().map((svg) => lastStep(lines(svg))));
  range = next && [Math.max(0, Math.floor(next[0])), Math.min(last, Math.ceil(next[1]))];
  if (range && (range[1] - range[0] < 1 || range[1] - range[0] >= last)) range = null;
  charts().forEach((svg) => { leave(svg); draw(svg); });
  const shown = document.querySelector("[data-range]");
  if (shown) shown.textContent = range ? `Steps ${range[0]} to ${range[1]}` : "";
  document.querySelectorAll('[data-zoom="out"], [data-zoom="left"], [data-zoom="right"], [data-zoom="all"]').forEach((button) => { button.disabled = !range; });
}

const MOVES = {
  in: (a, b) => [a + (b - a) / 4, b - (b - a) / 4], out: (a, b) => [a - (b - a) / 2, b + (b - a) / 2],
  left: (a, b) => [Math.max(0, a - (b - a) / 2), Math.max(b - a, b - (b - a) / 2)], right: (a, b, last) => [Math.min(last - (b - a), a + (b - a) / 2), Math.min(last, b + (b - a) / 2)],
  all: () => null,
};

function stepAt(svg, clientX) {
  const box = svg.getBoundingClientRect(), { first, last, width } = domain(svg, lines(svg));
  const share = (((clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT);
  return first + Math.min(1, Math.max(0, share)) * (last - first);
}

function point(svg, clientX) {
  const found = lines(svg), shape = domain(svg, found), step = stepAt(svg, clientX), value = svg.closest("figure").querySelector("[data-value]");
  const nearest = found.map(({ points }) => points.filter(([x]) => x >= shape.first && x <= shape.last).reduce((a, b) => (!a || Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a), null));
  if (!nearest.some(Boolean)) return;
  const [x] = place(nearest.find(Boolean), shape), cursor = svg.querySelector(".cursor") ?? add(svg, "line", { class: "cursor" });
  for (const [name, at] of Object.entries({ x1: x, x2: x, y1: TOP, y2: shape.height - BOTTOM })) cursor.setAttribute(name, at);
  value.dataset.before ??= value.textContent;
  value.textContent = `step ${Math.round(nearest.find(Boolean)[0])}: ${nearest.filter(Boolean).map(([, y]) => Number(y.toPrecision(4))).join(" / ")}`;
}

function leave(svg) {
  const value = svg.closest("figure").querySelector("[data-value]");
  svg.querySelector(".cursor")?.remove();
  if (value.dataset.before === undefined) return;
  value.textContent = value.dataset.before;
  delete value.dataset.before;
}

export function interactive(within) {
  let drag = null;
  within.addEventListener("pointerdown", (event) => {
    const svg = event.target.closest(CHART);
    if (!svg || event.button !== 0 || event.pointerType === "touch") return;
    event.preventDefault();
    drag = { svg, from: event.clientX, box: add(svg, "rect", { class: "selection", y: TOP, height: svg.viewBox.baseVal.height - TOP - BOTTOM, width: 0 }) };
    svg.setPointerCapture(event.pointerId);
  });
  within.addEventListener("pointermove", (event) => {
    const svg = drag?.svg ?? event.target.closest(CHART);
    if (!svg) return;
    point(svg, event.clientX);
    if (!drag) return;
    const shape = domain(svg, lines(svg)), at = [drag.from, event.clientX].map((x) => place([stepAt(svg, x), 0], shape)[0]);
    drag.box.setAttribute("x", Math.min(...at));
    drag.box.setAttribute("width", Math.abs(at[1] - at[0]));
  });
  within.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { svg, from, box } = drag, ends = [stepAt(svg, from), stepAt(svg, event.clientX)].sort((a, b) => a - b);
    box.remove();
    drag = null;
    if (Math.abs(event.clientX - from) >= LEAST_DRAG) show(ends);
  });
  within.addEventListener("pointerout", (event) => { const svg = event.target.closest(CHART); if (svg && !svg.contains(event.relatedTarget)) leave(svg); });
  within.addEventListener("dblclick", (event) => { if (event.target.closest(CHART)) show(null); });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const last = Math.max(...charts().map((svg) => lastStep(lines(svg))));
      show(MOVES[button.dataset.zoom](...(range ?? [0, last]), last));
    });
  }
}
