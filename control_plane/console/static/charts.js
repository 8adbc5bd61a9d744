// Adds points to a curve that the server drew, and shows values under the pointer. Sizes are those of documents/charts.py.
const LEFT = 52, BOTTOM = 24, TOP = 10, RIGHT = 10, MOST = 800;
const SVG = "http://www.w3.org/2000/svg";
function short(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) >= 0.001 || value === 0 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);
}

function domain(svg, points) {
  const { width, height } = svg.viewBox.baseVal;
  const values = points.flat().map(([, y]) => y);
  const last = Math.max(...points.flat().map(([x]) => x)) || 1;
  let low = Math.min(...values), high = Math.max(...values);
  const space = (high - low) * 0.05 || Math.max(Math.abs(high) * 0.05, 0.01);
  return { low: low >= 0 ? Math.max(0, low - space) : low - space, high: high + space, last, width, height };
}

function place([x, y], { low, high, last, width, height }) {
  return [LEFT + (x / last) * (width - LEFT - RIGHT), TOP + ((high - y) / (high - low)) * (height - TOP - BOTTOM)];
}

function draw(svg, points) {
  const range = domain(svg, points), lines = svg.querySelectorAll("polyline"), texts = [...svg.querySelectorAll("text")];
  points.forEach((line, i) => lines[i]?.setAttribute("points", line.map((p) => place(p, range).map((n) => n.toFixed(1)).join(",")).join(" ")));
  svg.querySelectorAll("circle").forEach((dot) => dot.remove());
  for (const point of points[1] ?? []) {
    const dot = svg.appendChild(document.createElementNS(SVG, "circle")), [x, y] = place(point, range);
    dot.setAttribute("class", "dot");
    dot.setAttribute("cx", x); dot.setAttribute("cy", y); dot.setAttribute("r", 3);
  }
  texts.slice(0, 5).forEach((text, tick) => { text.textContent = short(range.low + ((range.high - range.low) * tick) / 4); });
  [0, range.last / 2, range.last].forEach((step, i) => { if (texts[5 + i]) texts[5 + i].textContent = i === 2 ? `step ${short(step)}` : short(step); });
  svg.dataset.points = JSON.stringify(points);
}

export function addPoint(within, step, values) {
  for (const svg of within.querySelectorAll("svg[data-points]")) {
    const points = JSON.parse(svg.dataset.points), metrics = JSON.parse(svg.dataset.metrics);
    let isNew = false;
    metrics.forEach((name, i) => {
      const value = name === "memory_bytes" ? values[name] / 2 ** 30 : values[name];
      if (!Number.isFinite(value)) return;
      points[i] = points[i].filter(([x]) => x < step).concat([[step, value]]);
      if (points[i].length > MOST) points[i] = points[i].filter((_, at) => at % 2 === 0 || at === points[i].length - 1);
      isNew = true;
      if (i === 0) svg.closest("figure").querySelector("[data-value]").textContent = Number(value.toPrecision(4));
    });
    if (isNew) draw(svg, points);
  }
}

export function hover(within) {
  for (const svg of within.querySelectorAll("svg[data-points]")) {
    const shown = svg.closest("figure").querySelector("[data-value]");
    let cursor, before;
    svg.addEventListener("pointermove", (event) => {
      const points = JSON.parse(svg.dataset.points), box = svg.getBoundingClientRect(), range = domain(svg, points);
      const step = (((event.clientX - box.left) / box.width) * range.width - LEFT) / (range.width - LEFT - RIGHT) * range.last;
      const nearest = points.map((line) => line.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a?.[0] - step) || !a ? b : a), null));
      if (!nearest[0]) return;
      before ??= shown.textContent;
      cursor ??= svg.appendChild(document.createElementNS(SVG, "line"));
      const [x] = place(nearest[0], range);
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("y1", TOP); cursor.setAttribute("y2", range.height - BOTTOM);
      shown.textContent = `step ${Math.round(nearest[0][0])}: ${nearest.filter(Boolean).map(([, y]) => Number(y.toPrecision(4))).join(" / ")}`;
    });
    svg.addEventListener("pointerleave", () => { cursor?.remove(); cursor = undefined; if (before !== undefined) shown.textContent = before; before = undefined; });
  }
}
