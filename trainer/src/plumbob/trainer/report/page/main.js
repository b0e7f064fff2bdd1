// Which view is open: the part of the address after #. Keys. The start.

const VIEWS = { curves: "Curves", findings: "Findings", rollouts: "Rollouts", settings: "Settings" };
let viewNow = "";

async function show() {
  const h = parseHash(), main = document.getElementById("main");
  const view = h.view || (h.task !== undefined ? "rollout" : "curves");
  nav(view === "rollout" || view === "group" ? "rollouts" : view);
  if (view === "rollout") {
    const row = rowAt(h.run, Number(h.step), h.task, Number(h.rollout || 0));
    const at = h.token === undefined ? undefined : Number(h.token);
    if (row < 0) {
      viewNow = view; current = -1;
      applyFilters();
      return main.replaceChildren(el("p", { class: "alarm" }, `This page does not hold rollout ${h.rollout} of task ${h.task} in step ${h.step}: it was not stored, or the page left out that step to stay small.`), ...rolloutsView(null));
    }
    const again = viewNow === "rollout" && current === row && opened && opened.row === row;
    current = row;
    if (again) return at === undefined ? undefined : showToken(at);
    const detail = document.getElementById("detail");
    if ((viewNow === "rollout" || viewNow === "rollouts") && detail) {
      document.querySelector(".browser").classList.add("opened");
      redrawList();
      viewNow = view;
      return openRollout(row, detail, at);
    }
    viewNow = view;
    return main.replaceChildren(...rolloutsView((place) => openRollout(row, place, at)));
  }
  const back = viewNow === "rollout" && view === "rollouts" && document.querySelector(".browser");
  viewNow = view;
  if (back) return back.classList.remove("opened");
  current = view === "rollouts" ? current : -1;
  if (view === "group") return main.replaceChildren(...await groupView(h.run, Number(h.step), h.task, h.against));
  const parts = { curves: curvesView, findings: findingsView, rollouts: firstRollout, settings: settingsView }[view] || curvesView;
  main.replaceChildren(...parts().filter(Boolean));
}

function nav(view) {
  const failed = D.runs.flatMap((run) => run.findings).filter((f) => f.verdict === "fail").length;
  document.getElementById("nav").replaceChildren(...Object.entries(VIEWS).map(([name, title]) => el("a", {
    href: "#view=" + name, "aria-current": name === view ? "page" : null,
  }, title, name === "findings" && failed ? el("span", { class: "badge" }, String(failed)) : null)));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=checkbox]), textarea")) return;
  const act = {
    j: () => step(1), k: () => step(-1),
    g: () => { if (current >= 0) { const p = place(current); location.hash = link({ view: "group", run: p.run, step: p.step, task: p.task }); } },
    "/": () => {
      if (!document.getElementById("search")) { location.hash = "#view=rollouts"; setTimeout(focusSearch); } else focusSearch();
    },
    Escape: () => { if (viewNow === "rollout" || viewNow === "group") location.hash = "#view=rollouts"; },
  }[event.key];
  if (!act) return;
  if ((event.key === "j" || event.key === "k") && !rows.length) applyFilters();
  event.preventDefault();
  act();
}
function focusSearch() {
  const box = document.getElementById("search");
  if (!box) return;
  box.closest("details").open = true;
  box.focus();
}

// With --live: ask the server whether there is a new step. Nothing is read anew while a rollout is being looked at.
function watchServer() {
  let seen = null;
  setInterval(async () => {
    try {
      const { state } = await (await fetch("state")).json();
      if (seen !== null && state !== seen) {
        sessionStorage.setItem("chosen", JSON.stringify({ axis, smoothing, wanted, hidden: D.runs.filter((run) => !inCharts(run)).map((run) => run.name) }));
        if (viewNow === "curves" || viewNow === "findings") return location.reload();
        notes(["There are new steps: reload the page to see them."]);
      }
      seen = state;
    } catch { notes(["The server of this page has ended; what is shown is its last state."]); }
  }, 3000);
}

function notes(texts) {
  document.getElementById("notes").replaceChildren(...texts.map((text) => el("p", { class: "note" }, text)));
}

async function start() {
  D = await unpack("overview");
  document.getElementById("title").textContent = D.runs.length < 4 ? D.runs.map((run) => run.name).join(", ") : plural(D.runs.length, "run");
  notes(D.notes);
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });
  addEventListener("hashchange", show);
  addEventListener("keydown", onKey);
  if (D.live) {
    const chosen = JSON.parse(sessionStorage.getItem("chosen")); // before the page was loaded anew
    if (chosen) {
      ({ axis, smoothing, wanted } = chosen);
      D.runs.forEach((run, number) => { if (chosen.hidden.includes(run.name)) hidden.add(number); });
      runsTable.begun = true;
    }
    watchServer();
  }
  await show();
  document.documentElement.dataset.ready = "yes";
}
start().catch((error) => {
  document.getElementById("main").textContent = "The page could not be drawn: " + error + ". It needs a browser of 2023 or later.";
  throw error;
});
