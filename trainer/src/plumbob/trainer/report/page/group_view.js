// The rollouts of one task side by side, and the same task in other steps and runs.

// Rollouts with the same tokens share a column.
const TEXT_SHOWN = 3000; // tokens of one rollout in the columns; the rest is in its own view

async function groupView(runName, stepNumber, key, against) {
  const all = rowsOfTask(key), times = occurrences(all);
  if (!times.length) return [el("p", {}, "The page holds no rollout of this task.")];
  const run = Math.max(0, D.runs.findIndex((r) => r.name === runName));
  const chosen = times.find((t) => t.run === run && t.step === stepNumber) || times[0];
  const others = times.filter((t) => t !== chosen);
  const other = times.find((t) => t.id === against) || others[0];
  const sections = [await groupSection(chosen)];
  if (other && other !== chosen) sections.push(await groupSection(other));
  const task = D.tasks[D.index.task[all[0]]];
  return [
    el("header", { class: "rollout-head" }, el("h2", {}, "Task " + key), task.answer ? el("p", {}, "Right answer: ", el("b", {}, task.answer)) : null),
    others.length ? occurrencesTable(times, chosen, other, key) : el("p", { class: "help" }, "The page holds this task in one step only, so there is no other step to compare with."),
    ...sections,
  ];
}

// Each step of each run in which the task was played: {id, run, step, rows}.
function occurrences(all) {
  const found = new Map(), I = D.index;
  for (const row of all) {
    const id = I.run[row] + "/" + I.step[row];
    if (!found.has(id)) found.set(id, { id, run: I.run[row], step: I.step[row], rows: [] });
    found.get(id).rows.push(row);
  }
  return [...found.values()];
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

function occurrencesTable(times, chosen, other, key) {
  const I = D.index, several = D.runs.length > 1;
  return el("section", {}, el("h3", {}, "The same task in other steps"),
    table([...(several ? ["run"] : []), "step", "rollouts", "mean reward", "mean sampled tokens", ""], times.map((t) => [
      ...(several ? [D.runs[t.run].name] : []), String(t.step), String(t.rows.length), num(mean(t.rows.map((r) => I.reward[r])), 3), num(mean(t.rows.map((r) => I.sampled[r])), 3),
      t === chosen ? "shown first" : t === other ? "shown below" : el("a", { href: link({ view: "group", run: D.runs[chosen.run].name, step: chosen.step, task: key, against: t.id }) }, "compare")])));
}

async function groupSection(time) {
  const whole = await Promise.all(time.rows.map(rollout));
  whole.sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0) || a.rollout - b.rollout);
  const shared = sharedLength(whole.map((r) => r.ids)), I = D.index;
  const distinct = new Map(); // ids -> rollouts
  for (const r of whole) distinct.set(r.ids.join(), [...(distinct.get(r.ids.join()) || []), r]);
  const rewards = time.rows.map((row) => I.reward[row]);
  return el("section", { class: "group", "data-shared": shared },
    el("h3", {}, `${D.runs.length > 1 ? D.runs[time.run].name + ", step" : "Step"} ${time.step}: ${plural(whole.length, "rollout")}, mean reward ${num(mean(rewards), 3)}`),
    el("details", { class: "shared" }, el("summary", {}, `the first ${plural(shared, "token")} are the same in all`),
      el("p", { class: "text" }, whole[0].tokens.slice(0, shared).map((t) => tokenSpan(t)))),
    el("div", { class: "columns", tabindex: 0, "aria-label": "Rollouts, best reward first" }, [...distinct.values()].map((same) => column(same, whole[0], shared))));
}

function column(same, best, shared) {
  const r = same[0], I = D.index;
  const parts = r === best ? -1 : sharedLength([best.ids, r.ids]);
  const shown = r.tokens.slice(shared, shared + TEXT_SHOWN), left = r.tokens.length - shared - shown.length;
  return el("article", { class: "column" },
    el("header", {}, el("span", {}, same.length > 1 ? "rollouts " : "rollout ", same.map((each, i) => [i ? ", " : "", el("a", { href: link({ ...place(each.row), token: shared < r.ids.length ? shared : undefined }) }, String(each.rollout))])),
      el("span", { class: "reward", style: { "--share": rewardShare(r.reward) } }, num(r.reward, 3)),
      el("span", { class: "small" }, `advantage ${signed(r.advantage)} \u00b7 ${plural(I.sampled[r.row], "token")} \u00b7 ${r.stop}`)),
    el("p", { class: "text" }, shown.map((t) => tokenSpan(t, { part: t.at === parts })), left > 0 ? el("span", { class: "small" }, ` ... ${plural(left, "more token")}`) : null));
}

// Number of tokens at the start that are the same in all rows.
function sharedLength(lists) {
  const least = Math.min(...lists.map((list) => list.length));
  for (let i = 0; i < least; i++) if (lists.some((list) => list[i] !== lists[0][i])) return i;
  return least;
}
