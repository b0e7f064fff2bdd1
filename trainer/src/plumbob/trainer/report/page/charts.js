// Line charts. A series is {name, runs: numbers of its runs, color, dash, points: [[step, y]], low, high: [y]}; y may be null.

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

// A linear scale keeps within `range` [low, high], or what values there are beyond it.
function scaleOf(values, log, range) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low = Math.floor(Math.log10(low)); high = Math.ceil(Math.log10(high));
    if (low === high) high = low + 1;
    const every = Math.ceil((high - low) / 5), marks = [];
    for (let k = low; k <= high; k += every) marks.push(10 ** k);
    return { low, high, marks, at: (v) => (v > 0 ? (Math.log10(v) - low) / (high - low) : 0) };
  }
  const [least, most] = range ? [Math.min(range[0], low), Math.max(range[1], high)] : [low >= 0 ? 0 : -Infinity, Infinity];
  // Values that differ only by rounding count as equal: their differences are too small to be counted through.
  const equal = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const pad = equal ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  low = Math.max(least, equal && low === 0 ? 0 : low - pad); high = Math.min(most, high + pad);
  return { low, high, marks: ticks(low, high, 5), at: (v) => (v - low) / (high - low) };
}

// All charts share one axis, what part of it is shown, and one cursor.
const AXES = {
  step: { name: "step", of: () => 1 },
  seconds: { name: "seconds", of: (m, i) => ["time/rollout", "time/train", "time/sync"].reduce((sum, name) => sum + (m[name]?.[i] || 0), 0) },
  tokens: { name: "sampled tokens", of: (m, i) => (m["rollout/sampled_tokens"]?.[i] || 0) * (m["rollout/count"]?.[i] || 0) },
};
let axis = "step";
let zoom = null; // [low, high] on the axis; null: all
let redrawCharts = () => {};
const compactly = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

// Where a step lies on the axis: of a mean over runs, the mean of where it lies in each; null if it is not known.
function along(runs, step) {
  if (axis === "step") return step;
  const at = runs.map((r) => positions(D.runs[r]).get(step));
  return at.some((x) => x === undefined) ? null : mean(at);
}
function positions(run, name = axis) {
  run.positions ??= {};
  if (!run.positions[name]) {
    let sum = 0;
    run.positions[name] = new Map([[0, 0], ...(run.metrics.step || []).map((step, i) => [step, (sum += AXES[name].of(run.metrics, i))])]);
    if (!sum) run.positions[name] = new Map([[0, 0]]); // it does not tell, as a run of sft does not tell its rollouts
  }
  return run.positions[name];
}

// The part of a series in sight, with where its points lie and their smoothed values.
function inSight(s, weight) {
  const smoothed = smooth(s.points.map(([, y]) => y), s.still ? 0 : weight);
  const xs = s.points.map(([step]) => along(s.runs, step));
  const edge = zoom ? (zoom[1] - zoom[0]) * 0.01 : 0; // a hand does not hit the end exactly
  const kept = xs.map((_, i) => i).filter((i) => xs[i] !== null && (!zoom || (xs[i] >= zoom[0] - edge && xs[i] <= zoom[1] + edge)));
  const part = (list) => list && kept.map((i) => list[i]);
  return { ...s, points: part(s.points), xs: part(xs), smoothed: part(smoothed), low: part(s.low), high: part(s.high) };
}

// A figure with the chart, its legend, the numbers under the pointer and a table of all numbers.
function chart({ id, title, series, log = false, unit = "", note = "", weight = 0, help = "", range = null }) {
  const all = series.filter((s) => s.points.some(([, y]) => y !== null));
  if (!all.length) return null;
  const caption = el("figcaption", {}, el("h3", {}, title), unit ? el("span", { class: "unit" }, unit) : null);
  const figure = el("figure", { class: "chart", "data-chart": id || title }, caption);
  const shown = all.map((s) => inSight(s, weight)), xs = zoom || shown.flatMap((s) => s.xs);
  let ys = shown.flatMap((s) => [...s.smoothed, ...s.points.map(([, y]) => y), ...(s.low || []), ...(s.high || [])]).filter((y) => y !== null);
  if (log) ys = ys.filter((y) => y > 0);
  if (!ys.length) ys = [0.1, 1];
  const y = scaleOf(ys, log, range), x0 = Math.min(...xs), x1 = Math.max(...xs, zoom ? xs[1] : x0 + 1);
  const px = (v) => LEFT + ((v - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (v) => HEIGHT - BOTTOM - Math.max(0, Math.min(1, y.at(v))) * (HEIGHT - TOP - BOTTOM);
  const box = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": spoken(title, all) });
  for (const mark of y.marks) {
    box.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(mark), y2: py(mark) }),
      svg("text", { class: "tick", x: LEFT - 6, y: py(mark) + 3.5, "text-anchor": "end" }, num(mark, 3)));
  }
  for (const mark of ticks(x0, x1, 6).filter((v) => axis !== "step" || Number.isInteger(v))) {
    box.append(svg("text", { class: "tick", x: px(mark), y: HEIGHT - 8, "text-anchor": "middle" }, compactly.format(mark)));
  }
  shown.forEach((s) => box.append(drawn(s, px, py)));
  if (!shown.some((s) => s.points.length)) note = "no value in this part of the axis";
  const read = el("p", { class: "read", "aria-live": "off" }, note || "\u00a0");
  figure.cursor = crosshair(box, shown, px, read, note);
  pointed(box, (clientX) => {
    const area = box.getBoundingClientRect();
    return Math.max(x0, Math.min(x1, x0 + (((clientX - area.left) / area.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0)));
  }, px);
  figure.append(...[box, legend(all), read, numbers(all)].filter((part) => part !== null));
  if (help) figure.append(el("p", { class: "help" }, help));
  return figure;
}

const path = (points) => points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");

function drawn(s, px, py) {
  const group = svg("g", { style: { color: s.color } });
  const xs = s.xs.map(px);
  if (s.low) {
    const banded = xs.map((x, i) => [x, s.low[i], s.high[i]]).filter((p) => p[1] !== null && p[1] !== undefined);
    if (s.bars) for (const [x, low, high] of banded) group.append(svg("path", { class: "bar", d: path([[x, py(low)], [x, py(high)]]) }));
    else if (banded.length) group.append(svg("path", { class: "band", d: path([...banded.map(([x, low]) => [x, py(low)]), ...banded.reverse().map(([x, , high]) => [x, py(high)])]) + "Z" }));
  }
  const joined = (values) => values.map((y, i) => [xs[i], y]).filter(([, y]) => y !== null).map(([x, y]) => [x, py(y)]);
  const raw = joined(s.points.map(([, y]) => y)), line = joined(s.smoothed);
  if (path(raw) !== path(line)) group.append(svg("path", { class: "raw", d: path(raw) }));
  group.append(svg("path", { class: "line" + (s.wide ? " wide" : ""), d: path(line), "stroke-dasharray": s.dash || null }));
  if (line.length < 40) for (const [x, y] of line) group.append(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2.4 }));
  return group;
}

// Returns what moves the chart's cursor to a place on the axis, or with null takes it away, and tells the values there.
function crosshair(box, shown, px, read, note) {
  const line = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  box.append(line);
  const nearest = (xs, at) => xs.reduce((best, v) => (Math.abs(v - at) < Math.abs(best - at) ? v : best), xs[0]);
  return (at) => {
    const x = at === null ? undefined : nearest(shown.flatMap((s) => s.xs), at);
    line.setAttribute("visibility", x === undefined ? "hidden" : "visible");
    if (x === undefined) { read.textContent = note || "\u00a0"; return; }
    line.setAttribute("x1", px(x)); line.setAttribute("x2", px(x));
    let steps = [];
    const values = shown.map((s) => {
      const i = s.xs.indexOf(axis === "step" ? x : nearest(s.xs, x));
      if (i < 0 || s.points[i][1] === null) return null;
      steps.push(s.points[i][0]);
      return s.name + " " + num(s.points[i][1]);
    }).filter(Boolean);
    read.textContent = `step ${[...new Set(steps)].join(", ")}${axis === "step" ? "" : ` (${compactly.format(x)} ${AXES[axis].name})`}:  ${values.join(",  ")}`;
  };
}

// Moving over a chart moves the cursor of all of them; dragging zooms all to the part dragged over, a double click back.
function pointed(box, toAxis, px) {
  const part = svg("rect", { class: "zoomed", y: TOP, height: HEIGHT - TOP - BOTTOM });
  let from = null;
  const all = (at) => document.querySelectorAll("figure.chart").forEach((figure) => figure.cursor(at));
  const zoomTo = (range) => { zoom = range; redrawCharts(); };
  box.addEventListener("pointerdown", (event) => { from = toAxis(event.clientX); });
  box.addEventListener("pointermove", (event) => {
    const at = toAxis(event.clientX);
    all(at);
    if (from === null || !event.buttons) { from = null; part.remove(); return; }
    const [x, until] = [px(from), px(at)].sort((a, b) => a - b);
    part.setAttribute("x", x); part.setAttribute("width", until - x);
    box.append(part);
  });
  box.addEventListener("pointerup", (event) => {
    const range = from === null ? null : [from, toAxis(event.clientX)].sort((a, b) => a - b);
    from = null;
    if (range && px(range[1]) - px(range[0]) > 8) zoomTo(range);
  });
  box.addEventListener("pointerleave", () => all(null));
  box.addEventListener("dblclick", () => zoomTo(null));
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
