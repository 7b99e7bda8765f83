// Small charts: lines with intervals, stacked areas, histograms. Colors come from the style sheet.

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
    found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  }
  return found;
}

function frame({ title, unit, width, height, x, y, show, across = "step" }) {
  const left = 46, right = 12, top = 42, bottom = 30;
  const px = (value) => left + ((width - left - right) * (value - x[0])) / (x[1] - x[0] || 1);
  const py = (value) => height - bottom - ((height - top - bottom) * (value - y[0])) / (y[1] - y[0] || 1);
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img" });
  picture.append(s("text", { x: 0, y: 14, class: "title" }, title));
  if (unit) picture.append(s("text", { x: 0, y: 27, class: "unit" }, unit));
  for (const at of ticks(y[0], y[1], 4)) {
    picture.append(
      s("line", { x1: left, x2: width - right, y1: py(at), y2: py(at), class: "grid" }),
      s("text", { x: left - 6, y: py(at) + 3.5, class: "tick end" }, show(at)),
    );
  }
  const marks = ticks(x[0], x[1], Math.max(2, Math.floor(width / 90)));
  for (const at of marks) {
    if (across === "step" && !Number.isInteger(at)) continue;
    picture.append(s("text", { x: px(at), y: height - bottom + 14, class: "tick middle" }, number(at)));
  }
  picture.append(s("text", { x: width - right, y: height - 3, class: "tick end" }, across));
  return { picture, px, py, left, right, top, bottom };
}

// From a round number below all values to one above them.
function bounds(values, { zero = false, share = false } = {}) {
  if (share) return [0, 1];
  let low = Math.min(...values), high = Math.max(...values);
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) [low, high] = zero ? [0, 1] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const marks = ticks(low, high, 4);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

// series: [{name, points: [[x, y, low?, high?, note?]]}]
function lineChart({ title, unit, series, width = 360, height = 190, share = false, zero = false, show = number }) {
  const all = series.flatMap((one) => one.points);
  const xs = all.map((p) => p[0]);
  const ys = all.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]]);
  const x = [Math.min(...xs), Math.max(...xs)];
  if (x[0] === x[1]) x[1] += 1;
  const made = frame({ title, unit, width, height, x, y: bounds(ys, { share, zero }), show });
  const { picture, px, py } = made;
  series.forEach((one, index) => {
    const color = `series-${index % 6}`;
    for (const [at, , low, high] of one.points) {
      if (low !== undefined && low !== null) {
        picture.append(s("line", { x1: px(at), x2: px(at), y1: py(low), y2: py(high), class: `error ${color}` }));
      }
    }
    const path = one.points.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)} ${py(p[1]).toFixed(1)}`).join("");
    picture.append(s("path", { d: path, class: `line ${color}` }));
    if (one.points.length <= 40) {
      for (const p of one.points) {
        picture.append(s("circle", { cx: px(p[0]), cy: py(p[1]), r: one.points.length > 20 ? 1.8 : 2.6, class: `dot ${color}` }));
      }
    }
    if (series.length > 1) {
      picture.append(s("text", { x: width - made.right, y: 14 + 13 * index, class: `name end ${color}` }, shorten(one.name, 36)));
    }
  });
  const last = series.map((one) => `${one.name ?? title} ${show(one.points.at(-1)[1])}`).join(", ");
  picture.setAttribute("aria-label", visible(`${title}, at the end: ${last}`));
  pointer(picture, made, series, show, width, height);
  return h("figure", { class: "plot" }, picture);
}

// Shows the point nearest to the pointer above the chart.
function pointer(picture, { px, py, top, bottom, right }, series, show, width, height) {
  const line = s("line", { y1: top, y2: height - bottom, class: "pointer" });
  const ring = s("circle", { r: 4, class: "ring" });
  const words = s("text", { x: width - right, y: top - 6, class: "reading end" });
  const group = s("g", { visibility: "hidden" }, line, ring, words);
  picture.append(group);
  picture.addEventListener("pointerleave", () => group.setAttribute("visibility", "hidden"));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
    let best = null, least = Infinity;
    for (const one of series) {
      for (const p of one.points) {
        const far = Math.abs(px(p[0]) - at[0]) + 0.2 * Math.abs(py(p[1]) - at[1]);
        if (far < least) [least, best] = [far, p];
      }
    }
    if (!best) return;
    const around = best[2] === undefined || best[2] === null ? "" : ` (${show(best[2])} to ${show(best[3])})`;
    words.textContent = visible(`${best[4] ?? `step ${number(best[0])}`}: ${show(best[1])}${around}`);
    line.setAttribute("x1", px(best[0]));
    line.setAttribute("x2", px(best[0]));
    ring.setAttribute("cx", px(best[0]));
    ring.setAttribute("cy", py(best[1]));
    group.setAttribute("visibility", "visible");
  });
}

function stackChart({ title, unit, parts, width = 360, height = 190 }) {
  const names = Object.keys(parts);
  const steps = parts[names[0]].map((p) => p[0]);
  const sums = steps.map(() => 0);
  const layers = names.map((name) => parts[name].map((p, i) => [sums[i], (sums[i] += p[1])]));
  const x = [steps[0], steps.at(-1) === steps[0] ? steps[0] + 1 : steps.at(-1)];
  const { picture, px, py } = frame({ title, unit, width, height, x, y: bounds(sums, { zero: true }), show: number });
  const wide = steps.length === 1 ? [x[0], x[1]] : steps;
  layers.forEach((layer, index) => {
    const at = (i) => layer[Math.min(i, layer.length - 1)];
    const over = wide.map((step, i) => `${px(step).toFixed(1)},${py(at(i)[1]).toFixed(1)}`);
    const under = wide.map((step, i) => `${px(step).toFixed(1)},${py(at(i)[0]).toFixed(1)}`).reverse();
    picture.append(s("polygon", { points: [...over, ...under].join(" "), class: `area series-${index % 6}` }));
  });
  picture.setAttribute("aria-label", visible(`${title}: ${names.join(", ")}`));
  const total = sums.reduce((a, b) => a + b, 0) || 1;
  const keys = names.map((name, index) => {
    const own = parts[name].reduce((sum, p) => sum + p[1], 0) / total;
    return h("span", {}, h("i", { class: `swatch series-${index % 6}` }), `${name} ${percent(own)}`);
  });
  return h("figure", { class: "plot" }, picture, h("figcaption", { class: "keys" }, keys));
}

// Histogram with successful episodes in a separate color.
function histogram({ title, unit, rows, value, width = 360, height = 190 }) {
  const values = rows.map(value).filter((one) => one !== null && Number.isFinite(one));
  if (!values.length) return null;
  let low = Math.min(...values), high = Math.max(...values);
  const integers = values.every(Number.isInteger);
  const bins = Math.min(30, integers ? Math.max(1, high - low + 1) : 24);
  let size = (high - low) / bins || 1;
  if (integers) {
    size = Math.max(1, Math.ceil((high - low + 1) / bins));
    low -= 0.5;
  }
  const count = Math.max(1, Math.ceil((high - low) / size + 1e-9));
  const counts = Array.from({ length: count }, () => [0, 0]);
  for (const row of rows) {
    const one = value(row);
    if (one === null || !Number.isFinite(one)) continue;
    counts[Math.min(count - 1, Math.floor((one - low) / size))][row.success ? 0 : 1] += 1;
  }
  const most = Math.max(...counts.map((pair) => pair[0] + pair[1]));
  const { picture, px, py } = frame({
    title, unit, width, height, across: "", x: [low, low + size * count], y: bounds([most], { zero: true }), show: number,
  });
  counts.forEach(([good, other], index) => {
    const x = px(low + index * size) + 0.5, wide = Math.max(0.5, px(low + (index + 1) * size) - px(low + index * size) - 1);
    const words = `${number(low + index * size)} to ${number(low + (index + 1) * size)}: ${good + other} episodes, ${good} succeeded`;
    const bar = (from, to, kind) =>
      s("rect", { x, width: wide, y: py(to), height: py(from) - py(to), class: kind }, s("title", {}, words));
    picture.append(bar(0, good, "bar-good"), bar(good, good + other, "bar-other"));
  });
  picture.setAttribute("aria-label", visible(`${title} of ${values.length} episodes`));
  return h("figure", { class: "plot" }, picture);
}

function bars(counts, show) {
  const total = Object.values(counts).reduce((a, b) => a + b, 0) || 1;
  return h(
    "div",
    { class: "bars" },
    Object.entries(counts).map(([name, count]) => [
      h("span", { class: "label" }, name.replaceAll("_", " ")),
      h("span", { class: "track" }, h("i", { class: `bar outcome-${/^[a-z_]+$/.test(name) ? name : "other"}`, style: { width: `${(100 * count) / total}%` } })),
      h("span", { class: "amount" }, `${(show ?? whole)(count)} (${percent(count / total, total > 500 ? 1 : 0)})`),
    ]),
  );
}
