// Line charts. A series is {name, run, color, dash, points: [[x, y]], low, high: [y], raw}; y may be null.

const WIDTH = 440, HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;
const COLORS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2", "10 4"];

// Exponential moving average over the values that are there, corrected at its start; weight 0 changes nothing.
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const size = [1, 2, 5, 10].map((f) => f * step).find((s) => (high - low) / s <= count) || step * 10;
  const found = [];
  const first = Math.ceil(low / size - 1e-9);
  for (let i = 0; i <= count + 1 && (first + i) * size <= high + size * 1e-9; i++) found.push(Number(((first + i) * size).toPrecision(12)));
  return found;
}

function scaleOf(values, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low = Math.floor(Math.log10(low)); high = Math.ceil(Math.log10(high));
    if (low === high) high = low + 1;
    const every = Math.ceil((high - low) / 5), marks = [];
    for (let k = low; k <= high; k += every) marks.push(10 ** k);
    return { low, high, marks, at: (v) => (v > 0 ? (Math.log10(v) - low) / (high - low) : 0) };
  }
  // Values that differ only by rounding count as equal: their differences are too small to be counted through.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { const pad = Math.abs(low) * 0.1 || 1; low = low === 0 ? 0 : low - pad; high += pad; }
  else { const pad = (high - low) * 0.06; low = low >= 0 && low - pad < 0 ? 0 : low - pad; high += pad; }
  return { low, high, marks: ticks(low, high, 5), at: (v) => (v - low) / (high - low) };
}

// A figure with the chart, its legend, the numbers under the pointer and a table of all numbers.
function chart({ id, title, series, log = false, unit = "", note = "", weight = 0, help = "" }) {
  const shown = series.filter((s) => s.points.some(([, y]) => y !== null));
  const caption = el("figcaption", {}, el("h3", {}, title), unit ? el("span", { class: "unit" }, unit) : null);
  const figure = el("figure", { class: "chart", "data-chart": id || title }, caption);
  if (!shown.length) return null;
  const smoothed = shown.map((s) => smooth(s.points.map(([, y]) => y), s.still ? 0 : weight));
  const xs = shown.flatMap((s) => s.points.map(([x]) => x));
  let ys = shown.flatMap((s, i) => [...smoothed[i], ...s.points.map(([, y]) => y), ...(s.low || []), ...(s.high || [])]).filter((y) => y !== null);
  if (log) ys = ys.filter((y) => y > 0);
  if (!ys.length) ys = [0.1, 1];
  const y = scaleOf(ys, log), x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
  const px = (v) => LEFT + ((v - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (v) => HEIGHT - BOTTOM - Math.max(0, Math.min(1, y.at(v))) * (HEIGHT - TOP - BOTTOM);
  const box = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": spoken(title, shown) });
  for (const mark of y.marks) {
    box.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(mark), y2: py(mark) }),
      svg("text", { class: "tick", x: LEFT - 6, y: py(mark) + 3.5, "text-anchor": "end" }, num(mark, 3)));
  }
  for (const mark of ticks(x0, x1, 6).filter(Number.isInteger)) {
    box.append(svg("text", { class: "tick", x: px(mark), y: HEIGHT - 8, "text-anchor": "middle" }, String(mark)));
  }
  shown.forEach((s, i) => box.append(drawn(s, smoothed[i], px, py)));
  const read = el("p", { class: "read", "aria-live": "off" }, note || " ");
  crosshair(box, shown, smoothed, px, x0, x1, read, note);
  figure.append(...[box, legend(shown), read, numbers(shown)].filter((part) => part !== null));
  if (help) figure.append(el("p", { class: "help" }, help));
  return figure;
}

const path = (points) => points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");

function drawn(s, smoothed, px, py) {
  const group = svg("g", { style: { color: s.color } });
  const there = s.points.map(([x], i) => [x, smoothed[i], i]).filter(([, y]) => y !== null);
  if (s.low) {
    const banded = s.points.map(([x], i) => [x, s.low[i], s.high[i]]).filter((p) => p[1] !== null && p[1] !== undefined);
    if (s.bars) for (const [x, low, high] of banded) group.append(svg("path", { class: "bar", d: path([[px(x), py(low)], [px(x), py(high)]]) }));
    else if (banded.length) group.append(svg("path", { class: "band", d: path([...banded.map(([x, low]) => [px(x), py(low)]), ...banded.reverse().map(([x, , high]) => [px(x), py(high)])]) + "Z" }));
  }
  const raw = s.points.filter(([, y]) => y !== null).map(([x, y]) => [px(x), py(y)]);
  const line = there.map(([x, y]) => [px(x), py(y)]);
  if (path(raw) !== path(line)) group.append(svg("path", { class: "raw", d: path(raw) }));
  group.append(svg("path", { class: "line" + (s.wide ? " wide" : ""), d: path(line), "stroke-dasharray": s.dash || null }));
  if (line.length < 40) for (const [x, y] of line) group.append(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2.4 }));
  return group;
}

function crosshair(box, shown, smoothed, px, x0, x1, read, note) {
  const line = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  box.append(line);
  box.addEventListener("pointermove", (event) => {
    const area = box.getBoundingClientRect();
    const at = x0 + (((event.clientX - area.left) / area.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
    const steps = shown.flatMap((s) => s.points.map(([x]) => x));
    const x = steps.reduce((best, v) => (Math.abs(v - at) < Math.abs(best - at) ? v : best), steps[0]);
    line.setAttribute("x1", px(x)); line.setAttribute("x2", px(x)); line.setAttribute("visibility", "visible");
    read.textContent = "step " + x + ":  " + shown.map((s) => {
      const i = s.points.findIndex((p) => p[0] === x);
      return i < 0 || s.points[i][1] === null ? null : s.name + " " + num(s.points[i][1]);
    }).filter(Boolean).join(",  ");
  });
  box.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); read.textContent = note || "\u00a0"; });
}

function legend(shown) {
  if (shown.length === 1 && !shown[0].always) return null;
  return el("ul", { class: "legend" }, shown.map((s) => el("li", {},
    svg("svg", { viewBox: "0 0 22 8", class: "key", "aria-hidden": "true", style: { color: s.color } },
      svg("path", { class: "line", d: "M0 4H22", "stroke-dasharray": s.dash || null })), s.name)));
}

// The same numbers as a table, for screen readers and for copying; made when it is opened.
function numbers(shown) {
  const details = el("details", { class: "numbers" }, el("summary", {}, "numbers"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const steps = [...new Set(shown.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
    const at = shown.map((s) => new Map(s.points.map((p, i) => [p[0], i])));
    details.append(table(["step", ...shown.map((s) => s.name)], steps.map((x) => [String(x), ...shown.map((s, k) => {
      const i = at[k].get(x);
      if (i === undefined || s.points[i][1] === null) return "";
      const interval = s.low && s.low[i] !== null && s.low[i] !== undefined ? ` [${num(s.low[i])}, ${num(s.high[i])}]` : "";
      return num(s.points[i][1], 6) + interval;
    })])));
  });
  return details;
}

function spoken(title, shown) {
  return title + ". " + shown.map((s) => {
    const there = s.points.filter(([, y]) => y !== null);
    const [first, last] = [there[0], there[there.length - 1]];
    return `${s.name}: from ${num(first[1])} at step ${first[0]} to ${num(last[1])} at step ${last[0]}`;
  }).join("; ");
}
