// The list of episodes: filtered and sorted in memory, and only what is in sight is in the document.

const ROW = 28;

function episodeList(state, open) {
  const view = { rows: [], sort: "n", down: false, chosen: null };
  const spacer = h("div", { class: "spacer" });
  const box = h("div", { class: "rows", tabindex: "0", role: "listbox", "aria-label": "episodes" }, spacer);
  const count = h("span", { class: "count", role: "status" });
  const text = h("input", { type: "search", placeholder: "search", title: "in id, environment, group and message", "aria-label": "search" });
  const outcome = h("select", { "aria-label": "outcome" });
  const verdicts = h("select", { "aria-label": "success" },
    [["", "any verdict"], ["true", "success"], ["false", "no success"], ["null", "no verdict"]].map(([value, name]) => h("option", { value }, name)));
  const env = h("select", { "aria-label": "environment" });
  const head = h("div", { class: "row head" });

  function columns() {
    const some = (test) => state.rows.some(test);
    // Narrow screens show only the columns that distinguish episodes.
    const narrow = innerWidth < 620;
    const kept = new Set(["success", "id", "step", "total", "turns"]);
    return [
      ["success", "", "2.2em"], ["id", "episode", narrow ? "minmax(0, 1fr)" : "minmax(6.5em, 2fr)"],
      new Set(state.rows.map((row) => row.env)).size > 1 && ["env", "environment", "minmax(6em, 1.2fr)"],
      some((row) => row.step !== null) && ["step", "step", "3.4em"],
      ["total", "return", "4.2em"], ["turns", "turns", "3.4em"],
      some((row) => row.tokens) && ["tokens", "tokens", "4em"],
      ["seconds", "time", "4.6em"], ["outcome", "outcome", "6.2em"],
    ].filter((one) => one && (!narrow || kept.has(one[0])));
  }

  function cell(row, key) {
    if (key === "success") return badge(row);
    if (key === "seconds") return seconds(row.seconds);
    if (key === "total") return number(row.total, 4);
    if (key === "outcome") return row.outcome.replaceAll("_", " ");
    if (key === "env") return shorten(row.env.replace(/^rollgym\//, ""), 60);
    return typeof row[key] === "number" ? whole(row[key]) : shorten(row[key] ?? "", 80);
  }

  function choices(select, all, names) {
    const before = select.value;
    select.replaceChildren(h("option", { value: "" }, all), ...names.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
    select.value = names.includes(before) ? before : "";
  }

  function header() {
    const shown = columns();
    const widths = shown.map((one) => one[2]).join(" ");
    box.style.setProperty("--widths", widths);
    head.style.setProperty("--widths", widths);
    head.replaceChildren(...shown.map(([key, name]) =>
      h("button", {
        type: "button", "aria-label": `sort by ${name || "success"}`, data: { key },
        onclick: () => {
          view.down = view.sort === key ? !view.down : key !== "id" && key !== "outcome";
          view.sort = key;
          refresh(true);
        },
      }, name || "\u2713", view.sort === key ? (view.down ? " \u2193" : " \u2191") : "")));
  }

  function compare(a, b) {
    const [x, y] = [a[view.sort], b[view.sort]];
    if (x === y) return a.n - b.n;
    if (x === null || y === null) return x === null ? 1 : -1;
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return view.down ? -order : order;
  }

  function refresh(top) {
    const words = text.value.trim().toLowerCase();
    view.rows = state.rows.filter((row) =>
      (!outcome.value || row.outcome === outcome.value) && (!env.value || row.env === env.value) &&
      (!verdicts.value || String(row.success) === verdicts.value) &&
      (!words || `${row.id} ${row.env} ${row.group} ${row.error}`.toLowerCase().includes(words)));
    view.rows.sort(compare);
    count.textContent = view.rows.length === state.rows.length ? `${whole(state.rows.length)} episodes` : `${whole(view.rows.length)} of ${whole(state.rows.length)} episodes`;
    spacer.style.height = `${view.rows.length * ROW}px`;
    if (top) box.scrollTop = 0;
    header();
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
    const last = Math.min(view.rows.length, Math.ceil((box.scrollTop + (box.clientHeight || 600)) / ROW) + 4);
    const shown = columns();
    const made = [];
    for (let i = first; i < last; i += 1) {
      const row = view.rows[i];
      const line = h("div", {
        class: "row", role: "option", "aria-selected": String(row.n === view.chosen), data: { n: String(row.n) },
        onclick: () => open(row.n),
      }, shown.map(([key]) => h("span", { class: `cell ${key}`, title: key === "id" && row.error ? row.error : null }, cell(row, key))));
      line.style.top = `${i * ROW}px`;
      made.push(line);
    }
    spacer.replaceChildren(...made);
  }

  let due = false;
  box.addEventListener("scroll", () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; draw(); });
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (!step || !view.rows.length) return;
    event.preventDefault();
    const at = view.rows.findIndex((row) => row.n === view.chosen);
    const to = Math.max(0, Math.min(view.rows.length - 1, at + step));
    if (to * ROW < box.scrollTop) box.scrollTop = to * ROW;
    if ((to + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (to + 1) * ROW - box.clientHeight;
    open(view.rows[to].n);
  });
  text.addEventListener("input", () => refresh(true));
  for (const select of [outcome, verdicts, env]) select.addEventListener("change", () => refresh(true));
  new ResizeObserver(() => { header(); draw(); }).observe(box);

  return {
    element: h("div", { class: "list" }, h("div", { class: "filters" }, text, verdicts, outcome, env, count), head, box),
    update() {
      choices(outcome, "any outcome", [...new Set(state.rows.map((row) => row.outcome))].sort());
      const envs = [...new Set(state.rows.map((row) => row.env))].sort();
      choices(env, "any environment", envs);
      env.hidden = envs.length < 2;
      refresh(false);
    },
    choose(n) {
      view.chosen = n;
      draw();
    },
    only(filter) {
      text.value = filter.text ?? "";
      verdicts.value = "";
      env.value = "";
      outcome.value = filter.outcome ?? "";
      refresh(true);
    },
  };
}
