// Tokens as coloured text, the panel that says everything of one token, and the lines under a turn.

const MODES = {
  mask: ["trained or masked, and origin", null],
  moved: ["what moved the policy", (t) => t.moved],
  advantage: ["advantage", (t) => t.advantage],
  gap: ["gap: trainer - engine", (t) => t.gap],
  ratio: ["ratio: trainer / engine", (t) => (t.ratio === null ? null : t.ratio - 1)],
  logprob: ["log-probability (engine)", (t) => t.logprob],
  entropy: ["entropy", (t) => t.entropy],
};
let mode = "mask";

// Its classes: what the loss mask says, "odd" if that is not what was sampled, and "idle" in a rollout outside the gradient.
const colourOf = (token) => (token.trained ? "trained" : "masked") + (token.odd ? " odd" : "") + (token.state === IDLE ? " idle" : "");

function tokenSpan(token, { part = false } = {}) {
  const shown = token.text.replace(/\r/g, "\u240d").replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5\t");
  return el("span", {
    class: `t ${colourOf(token)} o-${token.origin}${part ? " part" : ""}`, "data-at": token.at,
    title: part ? "here it parts from the first rollout" : null,
  }, shown || "\u2205");
}

// Recolour tokens that are in the page. In the mode "mask" the classes do it; in the others a value does.
function paint(root, tokens) {
  const value = MODES[mode][1];
  root.classList.toggle("by-value", Boolean(value));
  const values = value ? tokens.map(value) : [];
  const most = Math.max(...values.filter((v) => v !== null).map(Math.abs), 1e-4);
  for (const span of root.querySelectorAll(".t")) {
    const v = value ? values[Number(span.dataset.at)] : null;
    span.style.backgroundColor = v === null || v === undefined || v === 0 ? "" :
      `color-mix(in srgb, var(${v > 0 ? "--plus" : "--minus"}) ${Math.round(8 + 72 * Math.min(1, Math.abs(v) / most))}%, transparent)`;
  }
  return value ? most : null;
}

const FIELDS = [
  ["log-probability, engine", (t) => num(t.logprob)], ["log-probability, trainer", (t) => num(t.trainer)],
  ["gap (trainer - engine)", (t) => signed(t.gap)], ["ratio (trainer / engine)", (t) => num(t.ratio)],
  ["log-probability, reference policy", (t) => num(t.reference)], ["log-probability after the step", (t) => num(t.after)],
  ["entropy", (t) => num(t.entropy)], ["advantage", (t) => signed(t.advantage)],
];

function describeToken(token) {
  const rows = token.trained || token.sampled !== null ? FIELDS.filter(([, f]) => f(token) !== "-").map(([name, f]) => [name, f(token)]) : [];
  if (token.moved !== null && token.trained) {
    rows.push([token.measured ? "moved: advantage x change" : "push: advantage x (1 - probability)", signed(token.moved)]);
  }
  return [
    el("p", { class: "head" }, el("b", {}, "token " + token.at), " id " + token.id + " ", el("code", {}, visible(token.text)), " ",
      el("span", { class: "chip " + colourOf(token) }, token.state), " ",
      el("span", { class: "chip o-" + token.origin }, token.origin)),
    rows.length ? el("dl", {}, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))
      : el("p", { class: "small" }, token.sampled !== null ? "No numbers are stored for it." : `Not sampled: it is part of the ${token.role} message as the chat template writes it, and not in the loss.`),
    token.odd ? el("p", { class: "alarm" }, token.trained ? "The model did not sample it, yet it is in the loss: its gradient teaches what the environment or the template wrote." : "The model sampled it, but it is not in the loss: nothing is learned from it.") : null,
  ].filter(Boolean);
}

// Engine (solid) and trainer (dashed) under one turn, and the gap between them as a strip.
function lines(tokens) {
  const own = tokens.filter((t) => t.sampled !== null && t.logprob !== null);
  if (!own.length) return null;
  const low = Math.min(-0.1, ...own.map((t) => Math.min(t.logprob, t.trainer ?? 0))), n = own.length, H = 46;
  const y = (v) => (v / low) * H;
  const at = (pick) => own.map((t, i) => [i + 0.5, pick(t)]).filter(([, v]) => v !== null).map(([x, v]) => [x, y(v)]);
  const steps = (pick) => (n === 1 ? at(pick).flatMap(([, v]) => [[0, v], [1, v]]) : at(pick));
  const most = Math.max(0.02, ...own.map((t) => Math.abs(t.gap ?? 0)));
  const box = svg("svg", { class: "lines", viewBox: `0 -3 ${n} ${H + 14}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Log-probabilities of ${n} tokens in engine and trainer, from ${num(low)} to 0; largest gap ${num(Math.max(...own.map((t) => Math.abs(t.gap ?? 0))))}` });
  const scored = own.some((t) => t.trainer !== null);
  box.append(svg("path", { class: "engine", d: path(steps((t) => t.logprob)) }));
  if (scored) {
    box.append(svg("path", { class: "trainer", d: path(steps((t) => t.trainer)) }));
    own.forEach((t, i) => { if (t.gap) box.append(svg("rect", { class: "gap", x: i, width: 1, y: H + 2, height: 8, opacity: Math.min(1, Math.abs(t.gap) / most).toFixed(3) })); });
  }
  const find = (event) => {
    const area = box.getBoundingClientRect();
    return own[Math.max(0, Math.min(n - 1, Math.floor(((event.clientX - area.left) / area.width) * n)))];
  };
  return { find, box, node: el("div", { class: "under" }, el("span", { class: "scale" }, "0"), box, el("span", { class: "scale" }, num(low, 3)),
    el("span", { class: "keys" }, el("i", { class: "engine" }), " engine ", scored ? [el("i", { class: "trainer" }), " trainer"] : "(the trainer did not score it: its advantage is 0)")) };
}
