// Elements from values, and numbers as people read them.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(4)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return whole(value).replace("-", "\u2212");
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e-", "e\u2212");
  return String(Number(value.toPrecision(digits))).replace("-", "\u2212");
}

function percent(value, digits = 0) {
  if (value === null || value === undefined) return "\u2013";
  return `${(100 * value).toFixed(digits)} %`;
}

function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value >= 7200) return `${number(value / 3600)} h`;
  if (value >= 120) return `${number(value / 60)} min`;
  if (value >= 1) return `${number(value)} s`;
  return value >= 1e-3 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} \u00b5s`;
}

function between(interval, show) {
  if (!interval || interval.low === undefined || interval.low === null) return "";
  return `${show(interval.low)} to ${show(interval.high)}`;
}

function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

function table(head, rows, kinds = []) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((cell, i) => h("th", { class: kinds[i] ?? "", scope: "col" }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: kinds[i] ?? "" }, cell))))),
    ),
  );
}

function folded(title, make, open = false) {
  const box = h("details", {}, h("summary", {}, title));
  let made = false;
  const show = () => {
    if (box.open && !made) {
      made = true;
      box.append(make());
    }
  };
  box.addEventListener("toggle", show);
  box.open = open;
  show();
  return box;
}

function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
