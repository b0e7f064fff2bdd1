// The list of rollouts. Only the rows in sight are elements of the page, however many rollouts there are.

const ROW = 58; // pixels, as in page.css
const AROUND = 6; // rows drawn above and below those in sight
let current = -1; // row of the index that is open
let redrawList = () => {};

function rolloutsView(target) {
  const counter = el("p", { class: "count", role: "status" });
  const bars = el("div", {});
  const list = listBox();
  const changed = (fromBin = false) => {
    applyFilters();
    counter.textContent = `${rows.length.toLocaleString("en")} of ${plural(D.index.run.length, "rollout")}`;
    bars.replaceChildren(histogram(changed));
    if (fromBin) for (const name of ["low", "high"]) document.getElementById("filter-" + name).value = F[name];
    list.draw();
  };
  const form = filterForm(() => { list.box.scrollTop = 0; changed(); });
  const detail = el("section", { class: "detail", id: "detail", "aria-label": "Rollout" });
  const narrow = matchMedia("(max-width: 760px)").matches;
  const folded = el("details", { class: "fold", open: !narrow }, el("summary", {}, "Filters"), form);
  const view = el("div", { class: "browser" + (target ? " opened" : "") },
    el("section", { class: "side", "aria-label": "Rollouts" }, folded, bars, counter, list.box), detail);
  if (!D.index.run.length) return [el("p", {}, "No rollout is stored in this run (a run of sft has none).")];
  changed();
  redrawList = list.draw;
  requestAnimationFrame(() => { list.reveal(); list.draw(); });
  if (target) target(detail);
  else detail.append(el("p", { class: "hint" }, "Choose a rollout. j and k go down and up, / searches, g shows the whole group."));
  return [view];
}

// The list with its first rollout beside it, where both have room.
function firstRollout() {
  applyFilters();
  if (matchMedia("(max-width: 760px)").matches || !rows.length) return rolloutsView(null);
  if (!rows.includes(current)) current = rows[0];
  const row = current, view = rolloutsView((detail) => openRollout(row, detail));
  view[0].classList.remove("opened");
  return view;
}

function listBox() {
  const inner = el("div", { class: "rows" });
  const box = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Rollouts that pass the filters" }, inner);
  let drawn = "";
  const draw = () => {
    inner.style.height = rows.length * ROW + "px";
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - AROUND);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + (box.clientHeight || 600)) / ROW) + AROUND);
    const state = [first, last, current, F.order, ...rows.slice(first, last)].join();
    if (state === drawn) return;
    drawn = state;
    inner.replaceChildren(...rows.slice(first, last).map((row, i) => listRow(row, first + i)));
  };
  const reveal = () => {
    const at = rows.indexOf(current);
    if (at < 0) return;
    const top = at * ROW;
    if (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  };
  box.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(box);
  return { box, draw: () => { reveal(); draw(); }, reveal };
}

function listRow(row, at) {
  const I = D.index, task = D.tasks[I.task[row]], group = groupOf(row), signs = [];
  if (I.tool_errors[row]) signs.push(plural(I.tool_errors[row], "tool error"));
  if (I.truncated[row]) signs.push("cut off");
  if (I.odd[row] >= 0) signs.unshift("wrong loss mask");
  return el("a", {
    class: "row" + (row === current ? " current" : "") + (at && F.order === "stored" && groupOf(rows[at - 1]) !== group ? " begins" : ""), href: link(place(row)), role: "option", "data-row": row,
    "aria-selected": String(row === current), "aria-posinset": at + 1, "aria-setsize": rows.length,
    style: { top: at * ROW + "px" },
  },
  el("span", { class: "reward", style: { "--share": rewardShare(I.reward[row]) } }, num(I.reward[row], 3)),
  el("span", { class: "what" }, el("b", { title: task.key }, `${ending(task.key)} #${I.rollout[row]} \u00b7 step ${I.step[row]}`),
    el("span", {}, D.runs.length > 1 ? D.runs[I.run[row]].name + ": " : null, I.reply[row] || "(empty)")),
  el("span", { class: "small" }, group.flat ? "no signal" : I.advantage[row] === null ? D.stops[I.stop[row]] : "advantage " + signed(I.advantage[row], 2), el("br"),
    signs.join(", ") || "group mean " + num(group.mean, 2)));
}

// Keys of tasks often begin alike and differ at their end.
const ending = (key) => (key.length > 9 ? "\u2026" + key.slice(-8) : key);

function rewardShare(reward) {
  if (rewardShare.range === undefined) {
    let low = 0, high = 0; // a badge is empty at 0, also where no reward is larger
    for (const v of D.index.reward) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
    rewardShare.range = [low, high];
  }
  const [low, high] = rewardShare.range;
  return reward === null || high === low ? "0%" : (((reward - low) / (high - low)) * 100).toFixed(0) + "%";
}

// The next rollout of the list, or the one before.
function step(by) {
  if (!rows.length) return;
  const at = rows.indexOf(current);
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  location.hash = link(place(next));
}
