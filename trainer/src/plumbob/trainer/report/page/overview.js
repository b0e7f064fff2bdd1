// The views "curves", "findings" and "settings".

let smoothing = 0;

const PANELS = [
  { title: "Training reward", metrics: ["reward/mean"], band: true },
  { title: "Held-out reward", held: true },
  { title: "Reward components", component: true },
  { title: "Share of each component in the variance within groups", match: /^reward\/.+\/variance_share$/ },
  { title: "Training loss", metrics: ["sft/loss"] },
  { title: "Advantages", metrics: ["advantage/largest", "advantage/mean_abs"] },
  { title: "Groups without a signal", metrics: ["groups/zero_signal_share"] },
  { title: "Length", metrics: ["rollout/sampled_tokens", "rollout/row_tokens"] },
  { title: "Cut off by a limit", metrics: ["rollout/truncated_share"] },
  { title: "Why rollouts ended", match: /^rollout\/stopped\// },
  { title: "Turns and tool calls", metrics: ["rollout/turns", "rollout/tool_calls", "rollout/tool_errors"] },
  { title: "Entropy", metrics: ["policy/entropy"] },
  { title: "KL divergence", metrics: ["policy/kl", "policy/step_kl"] },
  { title: "Clipped tokens", metrics: ["policy/clip_fraction_low", "policy/clip_fraction_high"] },
  { title: "Gap between engine and trainer", metrics: ["sync/sampling_gap", "sync/largest_gap", "sync/parity"], log: true },
  { title: "Gradient norm", metrics: ["optimizer/grad_norm"] },
  { title: "Movement of the weights in a step", metrics: ["optimizer/relative_update"], log: true },
  { title: "Learning rate", metrics: ["optimizer/learning_rate"] },
  { title: "Time per phase", metrics: ["time/rollout", "time/train", "time/sync"] },
];

const hidden = new Set(); // numbers of the runs that the charts leave out
const inCharts = (run) => !hidden.has(D.runs.indexOf(run));
const namesOf = () => [...new Set(D.runs.filter(inCharts).flatMap((run) => Object.keys(run.metrics)))];
const unitOf = (name) => (D.meanings[name] ? D.meanings[name].unit.replace(/^-$/, "") : "");

// Several runs: a colour is a run in every chart, and a dash a metric or a way of evaluating. One run: a colour is a metric.
const lookOf = (run, number) => (D.runs.length > 1 ? { color: COLORS[run % COLORS.length], dash: DASHES[number % DASHES.length] } : { color: COLORS[number % COLORS.length], dash: "" });

// Lowest and highest reward of the runs as far as they are known: no axis and no interval of a mean goes beyond them.
function rewardRange() {
  const of = (name) => D.runs.flatMap((run) => run.metrics[name] || []).filter((v) => v !== null);
  const [low, high] = [of("reward/smallest"), of("reward/largest")];
  return low.length && high.length ? [Math.min(...low), Math.max(...high)] : null;
}

// One series per run and metric.
function seriesOf(metrics, band) {
  const series = [];
  metrics.forEach((metric, m) => D.runs.forEach((run, r) => {
    const values = run.metrics[metric];
    if (!values || !inCharts(run)) return;
    const steps = run.metrics.step, several = D.runs.length > 1;
    const s = {
      name: metrics.length === 1 && several ? run.name : several ? metric + ", " + run.name : metric,
      runs: [r], ...lookOf(r, m), points: values.map((v, i) => [steps[i], v]),
    };
    const spread = run.metrics["reward/group_std"] || run.metrics["reward/std"];
    if (band && spread && run.metrics["groups/count"]) {
      const half = values.map((v, i) => (1.96 * spread[i]) / Math.sqrt(Math.max(run.metrics["groups/count"][i], 1)));
      const [least, most] = rewardRange() || [-Infinity, Infinity];
      s.low = values.map((v, i) => (v === null ? null : Math.max(v - half[i], least)));
      s.high = values.map((v, i) => (v === null ? null : Math.min(v + half[i], most)));
    }
    series.push(s);
  }));
  if (metrics.length === 1 && series.length > 1) series.push(...overSeeds(metrics[0]));
  return series;
}

// Mean and 95% interval (Student's t) over runs that differ in their seed alone.
function overSeeds(metric) {
  return D.seed_groups.filter((group) => group.runs.every((r) => inCharts(D.runs[r]) && D.runs[r].metrics[metric])).map((group) => {
    const at = group.runs.map((r) => new Map(D.runs[r].metrics.step.map((step, i) => [step, D.runs[r].metrics[metric][i]])));
    const steps = [...at[0].keys()].filter((step) => at.every((m) => typeof m.get(step) === "number"));
    const n = at.length, s = { name: `mean of ${n} seeds`, runs: group.runs, color: "var(--text)", dash: "", wide: true, points: [], low: [], high: [] };
    for (const step of steps) {
      const values = at.map((m) => m.get(step)), mean = values.reduce((a, b) => a + b, 0) / n;
      const half = group.t * Math.sqrt(values.reduce((a, v) => a + (v - mean) ** 2, 0) / (n - 1) / n);
      s.points.push([step, mean]); s.low.push(mean - half); s.high.push(mean + half);
    }
    return s;
  });
}

function heldOut() {
  const series = [];
  const hows = [...new Set(D.runs.flatMap((run) => run.evaluations.map((e) => e.how)))];
  D.runs.forEach((run, r) => hows.forEach((how, h) => {
    const own = run.evaluations.filter((e) => e.how === how);
    if (!own.length || !inCharts(run)) return;
    series.push({
      name: D.runs.length > 1 ? how + ", " + run.name : how, runs: [r], ...lookOf(r, h),
      points: own.map((e) => [e.step, e.mean]), low: own.map((e) => e.low ?? null), high: own.map((e) => e.high ?? null),
      bars: true, always: true, still: true,
    });
  }));
  return series;
}

function panel(spec) {
  const isComponent = (name) => D.meanings[name]?.metric === "reward/COMPONENT";
  const metrics = spec.component ? namesOf().filter(isComponent) : spec.match ? namesOf().filter((name) => spec.match.test(name)) : (spec.metrics || []).filter((name) => namesOf().includes(name));
  const series = spec.held ? heldOut() : seriesOf(metrics, spec.band);
  if (spec.component || spec.match) series.forEach((s) => { s.always = true; }); // which ones there are is the question
  const one = metrics.length === 1 && D.meanings[metrics[0]];
  return chart({
    id: spec.id || spec.title, title: spec.title, series, log: spec.log, weight: smoothing,
    unit: spec.held ? "reward" : metrics.length ? unitOf(metrics[0]) : "",
    range: spec.held || spec.band ? rewardRange() : metrics.length && unitOf(metrics[0]) === "share" ? [0, 1] : null,
    help: (spec.held ? "Bars: 95% intervals over the held-out tasks." : one ? one.meaning : "")
      + (spec.band ? " Band: a 95% interval over tasks." : ""),
  });
}

function curvesView() {
  const grid = el("div", { class: "charts" }), rest = el("div", { class: "charts" });
  const draw = () => {
    grid.replaceChildren(...PANELS.map(panel).filter(Boolean));
    back.hidden = !zoom;
    if (more.open) drawRest();
  };
  const drawRest = () => rest.replaceChildren(...namesOf().filter((name) => name !== "step").map((name) => panel({ id: name, title: name, metrics: [name] })).filter(Boolean));
  const more = el("details", { class: "more" }, el("summary", {}, "Every metric, one chart each"), rest);
  more.addEventListener("toggle", () => { if (more.open && !rest.childElementCount) drawRest(); });
  const value = el("output", {}, String(smoothing));
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, id: "smoothing", oninput: () => {
    smoothing = Number(slider.value); value.textContent = slider.value; draw();
  } });
  const known = (name) => name === "step" || D.runs.some((run) => positions(run, name).size > 1);
  const choose = el("select", { id: "axis", onchange: () => { axis = choose.value; zoom = null; draw(); } },
    Object.entries(AXES).filter(([name]) => known(name)).map(([name, { name: text }]) => el("option", { value: name, selected: name === axis }, text)));
  const back = el("button", { type: "button", id: "whole", onclick: () => { zoom = null; draw(); } }, "Show all");
  redrawCharts = draw;
  const runs = D.runs.length > 1 ? runsTable(draw) : null;
  draw();
  const failed = D.runs.flatMap((run) => run.findings).filter((f) => f.verdict === "fail").length;
  return [
    runs,
    el("div", { class: "bar-top" }, D.runs.length > 1 ? null : summary(), el("div", { class: "tools" }, el("span", { class: "help" }, "drag over a chart to zoom"), back,
      el("label", {}, "Along ", choose), el("label", { for: "smoothing", class: "slider" }, "Smoothing ", slider, value))),
    oddNote(),
    failed ? el("p", { class: "alarm" }, el("a", { href: "#view=findings" }, `${plural(failed, "finding")} of the doctor: what goes wrong, and since which step`)) : null,
    grid.childElementCount ? grid : el("p", {}, "No step has finished yet."), more,
  ];
}

// Where the loss was on other tokens than the sampled ones.
function oddNote() {
  const odd = rowsWhere((row) => D.index.odd[row] >= 0);
  return odd.length ? el("p", { class: "alarm" }, `In ${odd.length} of ${plural(D.index.run.length, "stored rollout")}, the loss was not on exactly the tokens that the model sampled: `,
    el("a", { href: link({ ...place(odd[0]), token: D.index.odd[odd[0]] }) }, "the first such token"), ".") : null;
}

const rowsWhere = (test) => D.index.run.map((_, row) => row).filter(test);

// Which rollouts show what a finding says, by its cause; of a finding with a step, those of that step.
const SHOWN_BY = {
  "loss-mask-wrong": (row) => D.index.odd[row] >= 0, "engine-trainer-mismatch": (row) => D.index.odd[row] >= 0,
  "tools-fail": (row) => D.index.tool_errors[row] > 0, "calls-not-read": (row) => D.index.tool_errors[row] > 0,
  "truncated-rollouts": (row) => D.index.truncated[row] === 1, "never-succeeds": (row) => !D.index.reward[row],
  "groups-without-variety": (row) => groupOf(row).flat, "too-little-signal": (row) => groupOf(row).flat,
};

function seenIn(run, finding) {
  const test = SHOWN_BY[finding.cause];
  const own = test ? rowsWhere((row) => D.index.run[row] === run && test(row)) : [];
  const inStep = own.filter((row) => !finding.step || D.index.step[row] === finding.step);
  const shown = (inStep.length ? inStep : own).slice(0, 3);
  return shown.length ? el("p", {}, "Seen in: ", shown.map((row, i) => [i ? ", " : "", el("a", {
    href: link({ ...place(row), token: D.index.odd[row] < 0 ? undefined : D.index.odd[row] }),
  }, `step ${D.index.step[row]}, task ${ending(D.tasks[D.index.task[row]].key)}, rollout ${D.index.rollout[row]}`)])) : null;
}

const lastOf = (list) => { const there = (list || []).filter((v) => v !== null); return there.length ? there[there.length - 1] : null; };
const heldOutOf = (run) => { const own = run.evaluations.filter((e) => e.how === "greedy"); return own.length ? own : run.evaluations; };

function summary() {
  const run = D.runs[0], reward = (run.metrics["reward/mean"] || []).filter((v) => v !== null), own = heldOutOf(run);
  const parts = [plural((run.metrics.step || []).length, "step"), run.config.model + " on " + run.env];
  if (reward.length) parts.push(`reward ${num(reward[0], 3)} \u2192 ${num(lastOf(reward), 3)}`);
  if (own.length > 1) parts.push(`held out ${num(own[0].mean, 3)} \u2192 ${num(lastOf(own).mean, 3)}`);
  return el("div", { class: "facts" }, el("p", {}, el("strong", {}, run.name), " " + parts.join(" \u00b7 ")));
}

const SHOWN_AT_FIRST = COLORS.length; // runs in the charts of a page of many, the best of them
let wanted = ""; // what the table of runs is filtered by

// The runs, those of an environment together and the best held-out reward first; what is ticked is in the charts.
function runsTable(changed) {
  const held = (run) => lastOf(heldOutOf(run)), score = (run) => held(run)?.mean ?? -Infinity;
  const last = (run) => lastOf(run.metrics["reward/mean"]) ?? -Infinity;
  const order = [...D.runs].sort((a, b) => a.env.localeCompare(b.env) || score(b) - score(a) || last(b) - last(a));
  const best = (run) => order.filter((other) => other.env === run.env && held(other)).length > 1 && order.find((other) => other.env === run.env) === run;
  const names = [...new Set(D.runs.flatMap((run) => Object.keys(run.config)))].filter((name) => !["run_name", "output_dir", "env"].includes(name));
  const usual = new Map(names.map((name) => {
    const values = D.runs.map((run) => JSON.stringify(run.config[name])), count = (value) => values.filter((other) => other === value).length;
    return [name, values.reduce((most, value) => (count(value) > count(most) ? value : most))];
  }));
  const own = (run) => names.filter((name) => JSON.stringify(run.config[name]) !== usual.get(name)).map((name) => `${name} ${String(run.config[name] ?? "") || "none"}`).join(", ");
  const passes = (run) => wanted.toLowerCase().split(/\s+/).every((word) => [run.name, run.env, own(run)].join(" ").toLowerCase().includes(word));
  if (!runsTable.begun) order.slice(SHOWN_AT_FIRST).forEach((run) => hidden.add(D.runs.indexOf(run)));
  runsTable.begun = true;
  const body = el("div", {});
  const draw = () => body.replaceChildren(table(["", "run", "environment", "held out", "reward", "steps", "last step", "findings", "unlike most"], order.filter(passes).map((run) => {
    const number = D.runs.indexOf(run), failed = run.findings.filter((f) => f.verdict === "fail").length, e = held(run);
    const tick = el("input", { type: "checkbox", checked: !hidden.has(number), "aria-label": "Show " + run.name, onchange: () => {
      if (tick.checked) hidden.delete(number); else hidden.add(number);
      changed();
    } });
    return [tick, [el("span", { class: "dot", style: { background: lookOf(number, 0).color } }), el("b", {}, run.name), best(run) ? " \u2605 best" : ""], run.env,
      e ? num(e.mean, 3) + (e.low !== undefined ? ` [${num(e.low, 2)}, ${num(e.high, 2)}]` : "") : "-", num(lastOf(run.metrics["reward/mean"]), 3),
      `${(run.metrics.step || []).length}${run.config.max_steps > 0 ? " of " + run.config.max_steps : ""}`, run.changed, failed ? el("a", { href: "#view=findings" }, `${failed} failed`) : "", el("span", { title: own(run) }, own(run))];
  }), { class: "runs" }));
  const filter = el("input", { type: "search", id: "runs-filter", value: wanted, size: 30, placeholder: "name, environment or setting", oninput: () => {
    wanted = filter.value;
    D.runs.forEach((run, number) => { if (passes(run)) hidden.delete(number); else hidden.add(number); });
    draw(); changed();
  } });
  draw();
  return el("section", { class: "facts" }, el("label", {}, "Runs ", filter), body);
}

const VERDICTS = { fail: "\u2717 fails", error: "! could not be checked", unsure: "? unsure", pass: "\u2713 holds" };

function findingsView() {
  const article = (number) => (f) => el("article", { class: "finding " + f.verdict },
    el("p", { class: "verdict" }, VERDICTS[f.verdict] + (f.step ? ", first in step " + f.step : "")),
    el("h3", {}, f.check), el("p", {}, f.evidence),
    f.cause ? el("p", {}, el("code", {}, f.cause), ": " + f.sentence + " ", el("strong", {}, f.advice)) : null,
    seenIn(number, f), f.command ? command(f.command, f.check) : null);
  return [oddNote(), ...D.runs.map((run, number) => {
    const wrong = run.findings.filter((f) => f.verdict === "fail" || f.verdict === "error"), rest = run.findings.filter((f) => !wrong.includes(f));
    const held = rest.filter((f) => f.verdict === "pass").length, unsure = rest.length - held;
    return el("section", { class: "findings" }, D.runs.length > 1 ? el("h2", {}, run.name) : null,
      run.findings.length ? null : el("p", {}, "Nothing has been judged of this run."), wrong.map(article(number)),
      rest.length ? el("details", {}, el("summary", {}, (wrong.length || oddNote() ? "" : "\u2713 Nothing is wrong: ")
        + `${held} of ${plural(run.findings.length, "check")} hold` + (unsure ? `, ${unsure} cannot be judged yet` : "")), rest.map(article(number))) : null);
  })];
}

// The parts of a run's start, one after the other, each where it began.
function startOf(run) {
  const parts = Object.entries(run.start), total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  let begun = 0;
  const bars = parts.map(([name, seconds]) => {
    const share = (part) => `${(100 * part / total).toFixed(1)}%`;
    const style = { "margin-left": share(begun), width: share(seconds) };
    begun += seconds;
    return [name, seconds.toFixed(1), el("div", { class: "start" }, el("div", { style }))];
  });
  const title = `From the command to the end of the first step: ${total.toFixed(1)} s`;
  return el("section", {}, el("h2", {}, D.runs.length > 1 ? `${run.name}: ${title}` : title), table(["part", "seconds", ""], bars));
}

function settingsView() {
  const names = [...new Set(D.runs.flatMap((run) => Object.keys(run.config)))];
  const show = (value) => (value === undefined ? "" : Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value));
  const differs = (name) => new Set(D.runs.map((run) => show(run.config[name]))).size > 1;
  const rows = [...names.filter(differs), ...names.filter((name) => !differs(name))];
  return [
    D.runs.length > 1 ? el("p", {}, "Settings that differ between the runs stand first, in bold.") : null,
    table(["setting", ...D.runs.map((run) => run.name)], rows.map((name) => [name, ...D.runs.map((run) => (differs(name) ? el("strong", {}, show(run.config[name])) : show(run.config[name])))])),
    ...D.runs.filter((run) => Object.keys(run.start).length).map(startOf),
    el("p", { class: "help" }, `Written ${D.written} from ${D.runs.map((run) => run.directory).join(", ")}.`),
  ];
}
