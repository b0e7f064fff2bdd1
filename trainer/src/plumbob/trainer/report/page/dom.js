// Making elements and words. Text from data only ever becomes text nodes, so nothing in a rollout can act as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, to] of Object.entries(value)) node.style.setProperty(property, to);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// A number for people: four significant digits, no digits that mean nothing.
function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}
const signed = (value, digits) => (value === null || value === undefined ? "-" : (value > 0 ? "+" : "") + num(value, digits));
const plural = (count, word) => count.toLocaleString("en") + " " + word + (count === 1 ? "" : "s");

// Blanks made visible, for a single token.
const visible = (text) => text.replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/\r/g, "\u240d");

function link(target) {
  const parts = { ...target };
  if (D.runs.length === 1) delete parts.run;
  return "#" + Object.entries(parts).filter(([, v]) => v !== undefined && v !== null && v !== "")
    .map(([k, v]) => k + "=" + encodeURIComponent(v)).join("&");
}
function parseHash() {
  const found = {};
  for (const part of location.hash.slice(1).split("&")) {
    const [name, ...rest] = part.split("=");
    if (!name) continue;
    try { found[name] = decodeURIComponent(rest.join("=")); } catch { found[name] = rest.join("="); }
  }
  return found;
}

// A text and a button that copies it.
function command(text, label) {
  const button = el("button", { type: "button", class: "small", "aria-label": "Copy: " + label }, "copy");
  button.addEventListener("click", () => copy(text, button));
  return el("div", { class: "command" }, el("code", {}, text), button);
}
function copy(text, button) {
  const area = el("textarea", { style: { position: "fixed", opacity: 0 } });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy"); // the clipboard API is closed to pages that are opened from disk
  area.remove();
  button.textContent = done ? "copied" : "select it";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

function table(heads, rows, attributes) {
  return el("div", { class: "scroll" }, el("table", attributes,
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell)))))));
}
