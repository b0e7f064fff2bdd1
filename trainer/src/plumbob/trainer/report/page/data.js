// The data in the page: the overview, the chunks of rollouts, texts of tokens.
// Data are gzip in base64; a chunk (the rollouts of one step of one run) is unpacked when one of them is looked at.

const CHUNKS_KEPT = 12;
const IDLE = "sampled, not trained"; // of a rollout whose advantage is 0, or that was masked out
let D = null; // the overview: see write.py:overview
const chunks = new Map(); // number -> promise of its rollouts, least recently used first

async function unpack(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function chunk(number) {
  const held = chunks.get(number) || unpack("chunk-" + number);
  chunks.delete(number);
  chunks.set(number, held);
  if (chunks.size > CHUNKS_KEPT) chunks.delete(chunks.keys().next().value);
  return held;
}

// The rollout at place `row` of the index, whole, with its tokens' parts worked out.
async function rollout(row) {
  const found = (await chunk(D.index.chunk[row]))[D.index.place[row]];
  return found.tokens ? found : Object.assign(found, { row, run: D.index.run[row], tokens: tokensOf(found, D.index.run[row]) });
}

function expand(lengths, total) {
  const values = [];
  lengths.forEach((length, i) => { for (let k = 0; k < length; k++) values.push(i % 2 === 1); });
  while (values.length < total) values.push(false);
  return values;
}

// One object per token: place, id, text, bytes (if it is part of a character), origin, node, and its numbers. `trained`: it is
// in the loss mask of the row; `odd`: that is not what was sampled; `sampled`: number among the sampled tokens, or null;
// `state`: the words for that, which also know whether the rollout was in the gradient at all.
function tokensOf(r, run) {
  const content = expand(r.content, r.ids.length), mask = expand(r.mask, r.ids.length), loss = r.loss ? expand(r.loss, r.ids.length) : mask;
  const tokens = [];
  let sampled = 0;
  r.nodes.forEach(([role, length], node) => {
    for (let k = 0; k < length; k++) {
      const at = tokens.length, s = mask[at] ? sampled++ : null;
      const pick = (list) => (s === null || !list ? null : list[s]);
      const token = {
        at, id: r.ids[at], node, role: D.roles[role], origin: content[at] ? D.roles[role] : "template", trained: loss[at], odd: loss[at] !== mask[at],
        state: loss[at] ? (mask[at] ? (r.trained === false ? IDLE : "trained") : "in the loss, not sampled") : mask[at] ? "sampled, not in the loss" : "masked", sampled: s, logprob: pick(r.logprobs), trainer: pick(r.trainer), reference: pick(r.reference),
        entropy: pick(r.entropies), after: pick(r.after),
        advantage: s === null ? (loss[at] ? r.advantage : null) : r.advantages ? r.advantages[s] : r.advantage,
      };
      token.gap = token.trainer === null || token.logprob === null ? null : token.trainer - token.logprob;
      token.ratio = token.gap === null ? null : Math.exp(token.gap);
      tokens.push(Object.assign(token, moved(token)));
    }
  });
  tokens.forEach((token) => { token.text = textOf(token.id, run); });
  return tokens;
}

// How much a token moved the policy. Measured where the trainer scored the rollout again after the step: advantage x
// (log-probability after - before). Elsewhere the size of the push on it: advantage x (1 - probability), because the
// gradient of log p with respect to the token's own logit is 1 - p.
function moved(token) {
  const before = token.trainer === null ? token.logprob : token.trainer;
  if (token.advantage === null || before === null || !token.trained) return { moved: null, measured: false };
  if (token.after !== null) return { moved: token.advantage * (token.after - before), measured: true };
  return { moved: token.advantage * (1 - Math.exp(Math.min(before, 0))), measured: false };
}

function textOf(id, run) {
  const text = D.texts[run][id];
  if (text === undefined) return "[" + id + "]";
  return Array.isArray(text) ? text.map((b) => "<" + b.toString(16).padStart(2, "0") + ">").join("") : text;
}

// The whole text of a rollout, with characters whole that several tokens make up.
function plainText(r, run) {
  if (!r.ids.length) return r.said.map(([text, calls]) => text + calls.map((call) => call.join(" ")).join("\n")).join("\n");
  return textOfIds(r.ids, run);
}

function textOfIds(ids, run) {
  const decoder = new TextDecoder();
  const table = D.texts[run];
  let text = "", bytes = [];
  for (const id of ids) {
    const piece = table[id];
    if (Array.isArray(piece)) { bytes.push(...piece); continue; }
    if (bytes.length) { text += decoder.decode(new Uint8Array(bytes)); bytes = []; }
    text += piece === undefined ? " " + id + " " : piece;
  }
  return bytes.length ? text + decoder.decode(new Uint8Array(bytes)) : text;
}

const place = (row) => ({
  run: D.runs[D.index.run[row]].name, step: D.index.step[row], task: D.tasks[D.index.task[row]].key,
  rollout: D.index.rollout[row],
});

// The row of the index that a permalink names; -1 if the page does not hold it.
function rowAt(runName, step, task, number) {
  const run = Math.max(0, D.runs.findIndex((r) => r.name === runName)), I = D.index;
  for (let row = 0; row < I.run.length; row++) {
    if (I.run[row] === run && I.step[row] === step && I.rollout[row] === number && D.tasks[I.task[row]].key === task) return row;
  }
  return -1;
}

// What is known of the group of a rollout: {mean, flat}. Flat: training has no signal from it, because all its advantages are
// 0, or its rewards are equal where advantages are not stored.
let groups = null;
function groupOf(row) {
  const I = D.index, id = (at) => I.run[at] + "/" + I.step[at] + "/" + I.task[at];
  if (!groups) {
    groups = new Map();
    I.run.forEach((_, at) => groups.set(id(at), [...(groups.get(id(at)) || []), at]));
    for (const [key, members] of groups) {
      const rewards = members.map((at) => I.reward[at]), pulls = members.map((at) => I.advantage[at]);
      groups.set(key, { mean: mean(rewards), flat: pulls.includes(null) ? new Set(rewards).size === 1 : pulls.every((v) => v === 0) });
    }
  }
  return groups.get(id(row));
}

// Rows of the rollouts of one task, in the order run, step, rollout.
function rowsOfTask(key) {
  const rows = [];
  D.index.task.forEach((task, row) => { if (D.tasks[task].key === key) rows.push(row); });
  return rows;
}
