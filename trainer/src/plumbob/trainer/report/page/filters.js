// Which rollouts the list shows: a form of filters, and a histogram of rewards whose bins filter too.

const BINS = 12;
const ALL = { run: "", step: "", env: "", stop: "", low: "", high: "", errors: false, cut: false, flat: false, search: "", order: "stored" };
const F = { ...ALL };
let rows = []; // rows of the index that pass, in order
let textHits = null; // Set of rows whose text holds the search, as far as they have been looked through; null: no search
let searching = 0; // number of the search under way

const ORDERS = {
  stored: ["step, then task", null],
  low: ["lowest reward", (I) => (a, b) => I.reward[a] - I.reward[b]],
  high: ["highest reward", (I) => (a, b) => I.reward[b] - I.reward[a]],
  pull: ["largest advantage", (I) => (a, b) => Math.abs(I.advantage[b] ?? 0) - Math.abs(I.advantage[a] ?? 0)],
  long: ["longest", (I) => (a, b) => I.tokens[b] - I.tokens[a]],
};

function passes(row, { reward = true } = {}) {
  const I = D.index;
  return (F.run === "" || I.run[row] === Number(F.run)) && (F.step === "" || I.step[row] === Number(F.step))
    && (F.env === "" || D.tasks[I.task[row]].env === F.env) && (F.stop === "" || I.stop[row] === Number(F.stop))
    && (!F.errors || I.tool_errors[row] > 0) && (!F.cut || I.truncated[row] === 1) && (!F.flat || groupOf(row).flat)
    && (!reward || F.low === "" || I.reward[row] >= Number(F.low)) && (!reward || F.high === "" || I.reward[row] <= Number(F.high))
    && (textHits === null || textHits.has(row));
}

function applyFilters() {
  rows = [];
  for (let row = 0; row < D.index.run.length; row++) if (passes(row)) rows.push(row);
  const order = ORDERS[F.order][1];
  if (order) rows.sort((a, b) => order(D.index)(a, b) || a - b);
}

// Look for the text in every rollout, chunk after chunk, so that the page stays usable meanwhile.
async function search(text, changed) {
  const mine = ++searching, wanted = text.trim().toLowerCase();
  textHits = wanted ? new Set() : null;
  if (!wanted) return changed("");
  const I = D.index, byChunk = new Map();
  I.chunk.forEach((c, row) => {
    if (!byChunk.has(c)) byChunk.set(c, []);
    byChunk.get(c).push(row);
    const task = D.tasks[I.task[row]];
    if ([task.key, task.answer, I.reply[row]].some((t) => t.toLowerCase().includes(wanted))) textHits.add(row);
  });
  let done = 0;
  for (const [c, own] of byChunk) {
    changed(`searching: ${++done} of ${byChunk.size} steps`);
    const found = await chunk(c);
    if (mine !== searching) return;
    for (const row of own) {
      if (!textHits.has(row) && plainText(found[I.place[row]], I.run[row]).toLowerCase().includes(wanted)) textHits.add(row);
    }
  }
  changed("");
}

function choice(name, label, options, changed) {
  const select = el("select", { id: "filter-" + name, onchange: () => { F[name] = select.value; changed(); } },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(F[name]) }, text)));
  return el("label", {}, label, select);
}

function filterForm(changed) {
  const I = D.index, unique = (list) => [...new Set(list)];
  const status = el("span", { class: "searching", role: "status" });
  let timer = 0;
  const box = el("input", { type: "search", id: "search", value: F.search, placeholder: "text, task or answer", oninput: () => {
    F.search = box.value;
    clearTimeout(timer);
    timer = setTimeout(() => search(F.search, (told) => {
      status.textContent = told;
      if (!told) status.dataset.done = F.search;
      changed();
    }), 200);
  } });
  const number = (name, label) => {
    const input = el("input", { type: "number", step: "any", id: "filter-" + name, value: F[name], oninput: () => { F[name] = input.value; changed(); } });
    return el("label", {}, label, input);
  };
  const check = (name, label) => {
    const input = el("input", { type: "checkbox", id: "filter-" + name, checked: F[name], onchange: () => { F[name] = input.checked; changed(); } });
    return el("label", { class: "check" }, input, label);
  };
  const envs = unique(D.tasks.map((task) => task.env));
  return el("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    el("label", { class: "wide" }, "Search", box), status,
    D.runs.length > 1 ? choice("run", "Run", [["", "all"], ...D.runs.map((run, i) => [i, run.name])], changed) : null,
    choice("step", "Step", [["", "all"], ...unique(I.step).sort((a, b) => a - b).map((s) => [s, s])], changed),
    envs.length > 1 ? choice("env", "Environment", [["", "all"], ...envs.map((e) => [e, e])], changed) : null,
    choice("stop", "Stop reason", [["", "all"], ...D.stops.map((s, i) => [i, s || "none"])], changed),
    number("low", "Reward from"), number("high", "to"),
    choice("order", "Order", Object.entries(ORDERS).map(([k, [text]]) => [k, text]), changed),
    check("errors", "tool errors"), check("cut", "cut off"), check("flat", "groups without a signal"),
    el("button", { type: "button", id: "clear", onclick: () => {
      Object.assign(F, ALL);
      textHits = null; searching++;
      document.getElementById("main").replaceChildren(...rolloutsView(current < 0 ? null : (place) => openRollout(current, place)));
    } }, "Clear filters"));
}

// Rewards of the rollouts that pass all filters but that of the reward. A click on a bin shows its rollouts alone.
function histogram(changed) {
  const I = D.index, all = [];
  for (let row = 0; row < I.run.length; row++) if (I.reward[row] !== null && passes(row, { reward: false })) all.push(I.reward[row]);
  if (!all.length) return el("div", { class: "histogram" });
  let low = Infinity, high = -Infinity;
  for (const v of I.reward) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
  if (low === high) { low -= 0.5; high += 0.5; }
  const counts = Array(BINS).fill(0), width = (high - low) / BINS;
  for (const v of all) counts[Math.min(BINS - 1, Math.floor((v - low) / width))]++;
  const most = Math.max(...counts), edge = (i) => Number((low + i * width).toPrecision(6));
  return el("div", { class: "histogram", role: "group", "aria-label": "Histogram of rewards: choose a bin to filter" },
    counts.map((count, i) => {
      const from = edge(i), to = i === BINS - 1 ? edge(BINS) : edge(i + 1) - width * 1e-9;
      const on = F.low !== "" && Math.abs(Number(F.low) - from) < width * 1e-3 && Math.abs(Number(F.high) - to) < width * 1e-3;
      return el("button", {
        type: "button", class: "bin", "aria-pressed": String(on), "data-count": count, disabled: !count && !on,
        title: `${num(from)} to ${num(edge(i + 1))}: ${plural(count, "rollout")}`,
        "aria-label": `reward ${num(from)} to ${num(edge(i + 1))}: ${plural(count, "rollout")}`,
        onclick: () => { [F.low, F.high] = on ? ["", ""] : [String(from), String(to)]; changed(true); },
      }, el("span", { style: { height: (count ? Math.max(4, (count / most) * 100) : 0) + "%" } }));
    }), el("span", { class: "from" }, num(low)), el("span", { class: "to" }, num(high)));
}
