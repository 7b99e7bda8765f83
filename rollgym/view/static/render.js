// Rendering of known observations (boards, lakes, shop pages, code); other observations as text.

const XSB = /^[#@+$*. \-_\n]+$/;

function board(text) {
  if (typeof text !== "string" || !text.includes("#") || !XSB.test(text)) return null;
  const lines = text.split("\n").filter((line) => line.length);
  const wide = Math.max(...lines.map((line) => line.length));
  if (wide > 60 || lines.length > 60) return null;
  const picture = s("svg", {
    viewBox: `0 0 ${wide * 20} ${lines.length * 20}`, class: "board", role: "img", "aria-label": "the board",
    width: Math.min(20 * wide, 420), height: (Math.min(20 * wide, 420) * lines.length) / wide,
  });
  lines.forEach((line, row) => {
    [...line].forEach((cell, column) => {
      const x = column * 20, y = row * 20;
      const put = (tag, attributes) => picture.append(s(tag, attributes));
      if (cell === "#") return put("rect", { x, y, width: 20, height: 20, class: "wall" });
      put("rect", { x, y, width: 20, height: 20, class: "floor" });
      if (".*+".includes(cell)) put("circle", { cx: x + 10, cy: y + 10, r: 4, class: "target" });
      if ("$*".includes(cell)) put("rect", { x: x + 3, y: y + 3, width: 14, height: 14, rx: 2, class: cell === "*" ? "box home" : "box" });
      if ("@+".includes(cell)) put("circle", { cx: x + 10, cy: y + 10, r: 6.5, class: "player" });
    });
  });
  return picture;
}

function lake(map, position) {
  const fits = Array.isArray(map) && map.length && map.length <= 40 && map.every((row) => typeof row === "string" && /^[SFHG]{1,40}$/.test(row));
  if (!fits) return null;
  const picture = s("svg", {
    viewBox: `0 0 ${map[0].length * 22} ${map.length * 22}`, class: "board", role: "img", "aria-label": "the lake",
    width: Math.min(22 * map[0].length, 420),
  });
  map.forEach((row, y) => [...row].forEach((cell, x) => {
    picture.append(s("rect", { x: x * 22 + 1, y: y * 22 + 1, width: 20, height: 20, rx: 3, class: `ice ice-${cell}` }));
    if (cell === "G") picture.append(s("text", { x: x * 22 + 11, y: y * 22 + 15, class: "cell middle" }, "G"));
  }));
  if (Array.isArray(position)) {
    picture.append(s("circle", { cx: position[1] * 22 + 11, cy: position[0] * 22 + 11, r: 6, class: "player" }));
  }
  return picture;
}

const PRICE = /^\$[\d.,]+( to \$[\d.,]+)?$/;
const PRODUCT = /^b0[a-z0-9]{8}$/i;

function shopPage(text, info) {
  const known = new Set((Array.isArray(info?.clickables) ? info.clickables : []).map((one) => String(one).toLowerCase()));
  const parts = String(text).split(" [SEP] ");
  if (parts.length > 400) return null;
  return h(
    "div",
    { class: "shop" },
    parts.map((part, place) => {
      const clickable = known.has(part.trim().toLowerCase());
      const price = PRICE.test(part.trim());
      const made = h("span", { class: clickable ? "chip" : price ? "price" : "piece" }, shorten(part, FOLD));
      const line = () => h("span", { class: "break" });
      // A product of a list starts a new line; the previous one ended with its price.
      if (clickable && PRODUCT.test(part.trim()) && !PRICE.test((parts[place - 1] ?? "").trim())) return [line(), made];
      return price ? [made, line()] : made;
    }),
  );
}

const WORDS = new Set(
  ("and as assert async await break class continue def del elif else except finally for from global if import in is " +
    "lambda nonlocal not or pass raise return try while with yield None True False").split(" "),
);
const PIECES = /(#[^\n]*)|("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(\b\d[\w.]*\b)|([A-Za-z_]\w*)/g;

function code(text) {
  const shown = text.length > 20000 ? text.slice(0, 20000) : text;
  const block = h("pre", { class: "text code" });
  let at = 0;
  for (const found of shown.matchAll(PIECES)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "digit" : WORDS.has(found[4]) ? "word" : null;
    if (!kind) continue;
    if (found.index > at) block.append(document.createTextNode(visible(shown.slice(at, found.index))));
    block.append(h("span", { class: `py-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  block.append(document.createTextNode(visible(shown.slice(at))));
  return shown.length < text.length ? h("div", {}, block, textBlock(text.slice(20000))) : block;
}

// Text with fenced code in it: the code highlighted, the rest as it is.
function withCode(text, kind) {
  const all = String(text ?? "");
  if (!all.includes("```") || all.length > 200000) return textBlock(all, kind);
  const found = [];
  all.split(/```(?:[A-Za-z0-9_+-]*\n)?/).forEach((part, index) => {
    if (part.trim()) found.push(index % 2 ? code(part.replace(/\n$/, "")) : textBlock(part.trim(), kind));
  });
  return h("div", { class: "parts" }, found);
}

function drawn(info) {
  return info && typeof info === "object" ? (board(info.board) ?? lake(info.map, info.position)) : null;
}

function observation(env, text, info) {
  if (/WebShop/.test(env) && String(text).includes(" [SEP] ")) {
    const made = shopPage(text, info);
    if (made) return made;
  }
  const picture = drawn(info);
  if (picture) return h("div", { class: "beside" }, picture, textBlock(text, "seen"));
  return withCode(text, "seen");
}

function action(env, text) {
  const python = /Code|Python/.test(env) && /\n/.test(text) && !text.includes("```");
  return python ? code(text) : withCode(text, "said");
}
