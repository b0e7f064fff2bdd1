// One rollout: its scores, every token, and which tokens moved the policy.

const PEEK = 90; // characters of a folded result
let reading = false; // whether rollouts are shown as messages
let opened = null; // {row, tokens, root, inspector, chosen}

async function openRollout(row, detail, at) {
  detail.replaceChildren(el("p", { class: "hint" }, "Opening ..."));
  const r = await rollout(row);
  if (row !== current) return; // another one was chosen meanwhile
  const inspector = el("aside", { class: "inspector", "aria-live": "polite", "aria-label": "Token" },
    el("p", { class: "small" }, "Point at a token, or choose one and use the arrow keys."));
  const root = el("div", { class: "tokens", tabindex: 0, "aria-label": "Tokens; arrow keys go from token to token" });
  opened = { row, r, tokens: r.tokens, root, inspector, chosen: null };
  const scale = el("span", { class: "small" });
  const view = ["messages", "tokens"].map((name) => el("button", { type: "button", onclick: () => readAs(name === "messages") }, name));
  detail.replaceChildren(heading(r, row), scores(r), r.tokens.length ? el("div", { class: "switch", role: "group", "aria-label": "What is shown" }, view) : "", messagesOf(r), colourBar(r, scale), root, inspector, movers(r), more(r));
  nodesOf(r).forEach((node) => root.append(node));
  readAs(reading);
  recolour(scale);
  root.addEventListener("pointerover", (event) => { const span = event.target.closest(".t"); if (span) inspect(r.tokens[span.dataset.at]); });
  root.addEventListener("pointerleave", () => { if (opened.chosen !== null) inspect(r.tokens[opened.chosen]); });
  root.addEventListener("click", (event) => { const span = event.target.closest(".t"); if (span) choose(Number(span.dataset.at)); });
  root.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(r.tokens.length - 1, (opened.chosen ?? -1) + by)));
  });
  if (at !== undefined) showToken(at);
  else detail.scrollTop = 0;
}

// Show rollouts as messages or as tokens, this one and the next ones.
function readAs(messages) {
  reading = messages;
  const detail = opened.root.parentNode;
  detail.classList.toggle("reading", messages || !opened.tokens.length);
  for (const button of detail.querySelectorAll(".switch button")) button.setAttribute("aria-pressed", String((button.textContent === "messages") === messages));
}

// A rollout as people read it: texts without what the template adds, calls as calls, results of tools folded.
function messagesOf(r) {
  return el("div", { class: "messages" }, r.nodes.map(([role], number) => {
    const own = r.tokens.filter((t) => t.node === number && t.origin !== "template").map((t) => t.id);
    const [text, calls] = r.said[number] || [textOfIds(own, r.run).trim(), []];
    const shown = D.roles[role] !== "tool" ? el("p", { class: "plain" }, text)
      : el("details", {}, el("summary", {}, "result: " + (text.length > PEEK ? text.slice(0, PEEK) + "\u2026" : text)), el("p", { class: "plain" }, text));
    return el("div", { class: "node o-" + D.roles[role] }, el("h4", {}, D.roles[role]), text ? shown : null,
      calls.map(([name, given]) => el("p", { class: "call" }, el("b", {}, name), " ", el("code", {}, given))));
  }));
}

const inspect = (token) => opened.inspector.replaceChildren(...describeToken(token));

function choose(at) {
  history.replaceState(null, "", link({ ...place(opened.row), token: at }));
  showToken(at);
}

function showToken(at) {
  const token = opened.tokens[at];
  if (!token) return;
  readAs(false);
  opened.root.querySelector(".t.chosen")?.classList.remove("chosen");
  const span = opened.root.querySelector(`.t[data-at="${at}"]`);
  span.classList.add("chosen");
  span.scrollIntoView({ block: "center" });
  requestAnimationFrame(() => span.scrollIntoView({ block: "center" })); // what came into sight only now has its own height
  opened.chosen = at;
  inspect(token);
}

function heading(r, row) {
  const task = D.tasks[D.index.task[row]], p = place(row);
  return el("header", { class: "rollout-head" },
    el("button", { type: "button", class: "back", onclick: () => { location.hash = "#view=rollouts"; } }, "\u2190 list"),
    el("h2", {}, `Step ${r.step}, task ${task.key}, rollout ${r.rollout}`, D.runs.length > 1 ? ` of ${p.run}` : ""),
    el("p", { class: "links" }, el("a", { href: link({ view: "group", run: p.run, step: p.step, task: p.task }) }, "the whole group, side by side"),
      el("button", { type: "button", class: "small", onclick: () => step(-1), "aria-label": "Previous rollout" }, "k \u2191"),
      el("button", { type: "button", class: "small", onclick: () => step(1), "aria-label": "Next rollout" }, "j \u2193")));
}

function scores(r) {
  const trained = r.trained === true ? "yes" : r.trained === false ? "no: its advantage is 0, or it is masked out" : "not stored";
  const facts = [
    ["reward", num(r.reward)], ...Object.entries(r.rewards).length > 1 ? Object.entries(r.rewards).map(([n, [score, weight]]) => [n, weight === 1 ? num(score) : `${num(score)} x ${num(weight)}`]) : [],
    ["advantage", signed(r.advantage)], ["in the gradient", trained], ["stop", (r.stop || "-") + (r.truncated ? " (cut off)" : "")],
    ["tokens", `${r.ids.length}, ${r.mask.filter((_, i) => i % 2).reduce((a, b) => a + b, 0)} sampled`], ["seconds", num(r.seconds)],
  ];
  const answer = D.tasks[D.index.task[r.row]].answer;
  if (answer) facts.push(["right answer", answer]);
  return el("div", {}, el("dl", { class: "scores" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    r.errors.map((error) => el("p", { class: "alarm" }, error)), oddTokens(r));
}

// What the row's loss mask has that was not sampled, and the reverse.
function oddTokens(r) {
  if (r.odd < 0) return null;
  const length = r.loss.reduce((a, b) => a + b, 0), more = r.tokens.filter((t) => t.odd && t.trained), less = r.tokens.filter((t) => t.odd && !t.trained);
  const first = (tokens) => el("a", { href: link({ ...place(r.row), token: tokens[0].at }) }, "token " + tokens[0].at);
  return el("p", { class: "alarm" }, "The loss is not on the sampled tokens: ",
    more.length ? [plural(more.length, "token"), " in the loss that the model did not sample, the first is ", first(more), ". "] : null,
    less.length ? [plural(less.length, "sampled token"), " not in the loss, the first is ", first(less), ". "] : null,
    length !== r.ids.length ? `Its training row has ${plural(length, "token")}, the rollout ${r.ids.length}.` : null);
}

function colourBar(r, scale) {
  const select = el("select", { id: "mode", onchange: () => { mode = select.value; recolour(scale); } },
    Object.entries(MODES).map(([value, [label]]) => el("option", { value, selected: value === mode }, label)));
  const count = (test) => r.tokens.filter(test).length;
  return el("div", { class: "colours" }, el("label", {}, "Colour by ", select), scale,
    el("ul", { class: "key" },
      [...new Map(r.tokens.map((t) => [t.state, t])).values()].sort((a, b) => b.trained - a.trained).map((t) =>
        el("li", {}, el("span", { class: "chip " + colourOf(t) }, t.state), ` ${count((other) => other.state === t.state)}`)),
      D.roles.map((origin) => el("li", {}, el("span", { class: "chip o-" + origin }, origin), ` ${count((t) => t.origin === origin)}`))));
}

function recolour(scale) {
  const most = paint(opened.root, opened.tokens);
  scale.textContent = most === null ? "" : `largest: ${num(most)}; red below 0, green above` + (mode === "moved" && !opened.tokens.some((t) => t.measured) ? " (an estimate, see below)" : "");
}

function nodesOf(r) {
  let turn = 0;
  return r.nodes.map(([role], number) => {
    const own = r.tokens.filter((t) => t.node === number), sampled = own.filter((t) => t.sampled !== null).length;
    const title = D.roles[role] + (sampled ? `, turn ${++turn}: ${plural(sampled, "sampled token")}` : `: ${plural(own.length, "token")}`);
    const under = sampled ? lines(own) : null;
    if (under) {
      under.box.addEventListener("pointermove", (event) => inspect(under.find(event)));
      under.box.addEventListener("click", (event) => choose(under.find(event).at));
    }
    return el("div", { class: "node o-" + D.roles[role] }, el("h4", {}, title), el("p", { class: "text" }, own.map((t) => tokenSpan(t))), under && under.node);
  });
}

function movers(r) {
  const own = r.tokens.filter((t) => t.moved).sort((a, b) => Math.abs(b.moved) - Math.abs(a.moved)).slice(0, 12);
  if (!own.length) return el("p", { class: "help" }, r.advantage === 0 ? "Its advantage is 0: no token of it moved the policy." : "Which tokens moved the policy is not stored for it.");
  const measured = own.some((t) => t.measured);
  return el("section", { class: "movers" }, el("h3", {}, "Tokens that moved the policy most"),
    el("p", { class: "help" }, measured ? "Advantage x change of the token's log-probability in this step. Above 0: the step did what the reward asked."
      : "Advantage x (1 - probability), the size of the push on each token: the trainer scored this rollout only before the step's update. A few rollouts of some steps are scored after it too, and have the change itself."),
    table(["token", "text", "advantage", measured ? "change" : "1 - probability", measured ? "moved" : "push"], own.map((t) => [
      el("a", { href: link({ ...place(r.row), token: t.at }) }, String(t.at)), el("code", {}, visible(t.text)), signed(t.advantage), num(t.moved / t.advantage), signed(t.moved)])));
}

function more(r) {
  const run = D.runs[r.run], file = `${run.directory}/traces/step_${r.step}.jsonl.gz`, one = `${run.directory}/replay.jsonl`;
  const metrics = Object.entries(r.metrics);
  return el("section", {}, el("h3", {}, "Replay"),
    el("p", { class: "help" }, "Calls the tools again and computes the reward again, and says whether it equals the stored one."),
    command(`gzip -dc ${quoted(file)} | sed -n ${r.line}p > ${quoted(one)} && evaluate ${r.env || run.env} --replay ${quoted(one)}`, "replay this rollout"),
    el("details", {}, el("summary", {}, "Metrics of the environment"), table(["metric", "value"], metrics.map(([name, value]) => [name, num(value)]))),
    el("p", { class: "help" }, "Numbers of tokens are stored with four decimals."));
}

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : "'" + text.replace(/'/g, "'\\''") + "'");
