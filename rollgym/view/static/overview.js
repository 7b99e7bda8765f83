// First page: headline results, then details.

function card(name, value, note) {
  return h("div", { class: "card" }, h("div", { class: "value" }, value), h("div", { class: "name" }, name), note && h("div", { class: "note" }, note));
}

// Marks a number that a warning makes doubtful, such as success 0 without any valid action.
function marked(text, suspect) {
  return suspect ? [text, h("span", { class: "suspect", title: "see the warnings below", "aria-label": "suspect: see the warnings" }, " \u26a0")] : [text];
}

function headline(data) {
  const trained = data.headline.trained;
  if (trained?.length) return trained.map((one) => trainedHeadline(one, data, trained.length > 1));
  const success = data.totals.success, average = data.totals.return;
  if (data.kind === "train") return h("div", { class: "hero" }, h("p", { class: "big" }, "\u2013"), h("p", {}, "No evaluation on held-out tasks is recorded yet."));
  if (success) {
    return h("div", { class: "hero" }, h("p", { class: "big" }, ...marked(percent(success.value, success.of >= 200 ? 1 : 0), data.suspect)),
      h("p", {}, h("b", {}, `of ${whole(success.of)} episodes succeeded`), `. 95 % interval: ${between(success, (v) => percent(v, 1))}.`,
        data.success_means ? h("span", { class: "small block" }, `Success means: ${shorten(data.success_means, 300)}.`) : ""));
  }
  if (average) {
    return h("div", { class: "hero" }, h("p", { class: "big" }, number(average.value)),
      h("p", {}, h("b", {}, `mean return of ${whole(average.of)} episodes`), average.low === undefined ? "." : `. 95 % interval: ${between(average, number)}.`));
  }
  return h("div", { class: "hero" }, h("p", { class: "big" }, "\u2013"), h("p", {}, "No episode with a score yet."));
}

// Separates the effect of imitation from that of reinforcement learning.
function trainedHeadline({ env, first: untaught, taught, last }, data, several) {
  const first = taught ?? untaught;
  const change = last.success.value - first.success.value;
  const apart = first.success.high < last.success.low ? "better" : last.success.high < first.success.low ? "worse" : "";
  const words = first === last || last.step === first.step && first.phase === last.phase
    ? "one evaluation so far"
    : apart ? `clearly ${apart}: the intervals do not meet` : Math.abs(change) < 1e-9 ? "no change" : "no clear difference: the intervals overlap";
  return h("div", { class: "hero" },
    h("p", { class: "big" }, percent(first.success.value), h("span", { class: "arrow", "aria-label": "to" }, " \u2192 "), ...marked(percent(last.success.value), last.suspect)),
    h("p", {}, h("b", {}, `success on held-out tasks${several ? ` of ${shorten(env, 80)}` : ""}`), ` by ${whole(data.headline.steps)} steps of reinforcement learning: ${words}.`,
      h("span", { class: "small block" }, `95 % intervals: ${between(first.success, (v) => percent(v, 1))}, then ${between(last.success, (v) => percent(v, 1))}; ${whole(last.episodes ?? 0)} episodes each.`,
        taught ? ` Before the warm start: ${percent(untaught.success.value)}.` : "")));
}

function overviewView(data, rows, show) {
  const totals = data.totals;
  const cards = h("div", { class: "cards" },
    card(data.kind === "train" ? "episodes trained on" : "episodes", whole(totals.episodes), totals.tasks && totals.tasks !== totals.episodes ? `${whole(totals.tasks)} tasks` : null),
    data.kind === "train" ? card("training steps", whole(data.headline.steps ?? 0)) : null,
    totals.return && card("mean return", number(totals.return.value), between(totals.return, number)),
    totals.length.mean !== undefined && card("turns", number(totals.length.mean), `90 % up to ${number(totals.length.p90)}`),
    totals.valid !== null && card("valid actions", percent(totals.valid, 1)),
    totals.tokens ? card("action tokens", whole(totals.tokens)) : null,
    totals.seconds.mean !== undefined && card("episode time", seconds(totals.seconds.mean), `90 % up to ${seconds(totals.seconds.p90)}`),
    card("failed to run", whole(totals.failed), totals.failed ? "not scored, see below" : null),
    ...Object.entries(data.pass_at_k).filter(([k]) => k !== "1").slice(-2).map(([k, v]) => card(`pass@${k}`, percent(v, 1))));
  const command = data.command ? h("p", { class: "command" }, h("code", {}, shorten(data.command, 1000))) : null;
  return h("div", {}, headline(data), command, cards, data.notes.map((note) => h("p", { class: "note warn" }, shorten(note, 600))), ...charts(data, rows),
    totals.episodes ? section("Outcomes", bars(data.outcomes)) : null, tables(data), failureTable(data, show));
}

function charts(data, rows) {
  const found = [];
  if (data.evaluations.length) {
    const by = new Map();
    for (const one of data.evaluations) {
      if (!one.success) continue;
      if (!by.has(one.env)) by.set(one.env, []);
      by.get(one.env).push([one.step, one.success.value, one.success.low, one.success.high, `${one.phase}, step ${one.step}`]);
    }
    const series = [...by].map(([name, points]) => ({ name, points }));
    if (series.length) {
      found.push(section("Held-out tasks", lineChart({ title: "Success", unit: "share of held-out tasks, 95 % intervals", series, width: Math.max(480, Math.min(1180, innerWidth - 62)), height: 250, share: true, show: (v) => percent(v) })));
    }
  }
  const shares = new Set(["success", "valid_actions"]);
  const plots = data.curves.map((one) => lineChart({
    title: one.title, unit: one.unit, series: [{ name: one.title, points: one.points }], share: shares.has(one.name),
    zero: !["return"].includes(one.name), show: shares.has(one.name) ? (v) => percent(v) : number,
  }));
  if (data.split) plots.push(stackChart(data.split));
  if (plots.length) found.push(section("Training", h("div", { class: "plots" }, plots)));
  if (data.kind !== "train" && rows.length) {
    const kinds = [
      histogram({ title: "Return", unit: "episodes; blue: succeeded", rows, value: (row) => row.total }),
      histogram({ title: "Turns", unit: "episodes; blue: succeeded", rows, value: (row) => row.turns }),
      rows.some((row) => row.tokens) ? histogram({ title: "Action tokens", unit: "episodes; blue: succeeded", rows, value: (row) => row.tokens }) : null,
    ].filter(Boolean);
    found.push(section("Spread", h("div", { class: "plots" }, kinds)));
  }
  return found;
}

function tables(data) {
  const found = [];
  if (data.suite?.entries.length) {
    found.push(section(`Suite ${data.suite.name}`,
      table(["entry", "success", "95 % interval", "score", "95 % interval", "golden success", ""],
        data.suite.entries.map((one) => [one.name, one.success ? percent(one.success.value, 1) : "\u2013", between(one.success, (v) => percent(v, 1)),
          one.score ? number(one.score.value) : "\u2013", between(one.score, number), one.golden ? `${percent(one.golden.success, 1)} \u00b1 ${percent(one.golden.tolerance, 1)}` : "\u2013",
          one.golden ? h("span", { class: `badge ${one.golden.reached ? "good" : "bad"}` }, one.golden.reached ? "reached" : "missed") : ""]),
        ["", "num", "num", "num", "num", "num", ""])));
  }
  if (data.envs.length) {
    found.push(section(data.kind === "train" ? "Episodes trained on, by environment" : data.suite ? "By entry" : "By environment",
      table([data.suite ? "entry" : "environment", "episodes", "success", "95 % interval", "mean return", "95 % interval", "turns", "valid actions", "failed"],
        data.envs.map((one) => [one.env, whole(one.episodes), one.success ? percent(one.success.value, 1) : "\u2013", between(one.success, (v) => percent(v, 1)),
          one.return ? number(one.return.value) : "\u2013", between(one.return, number), number(one.length.mean), percent(one.valid, 1), whole(one.failed)]),
        ["", ...Array(8).fill("num")])));
  }
  if (data.evaluations.length) {
    found.push(section("Evaluations",
      table(["when", "step", "environment", "success", "95 % interval", "mean return", "turns", "episodes", "failed"],
        data.evaluations.map((one) => [one.phase, whole(one.step), one.env, h("span", {}, ...marked(one.success ? percent(one.success.value, 1) : "\u2013", one.suspect)), between(one.success, (v) => percent(v, 1)),
          one.return ? number(one.return.value) : "\u2013", number(one.length), one.episodes === null ? "\u2013" : whole(one.episodes), whole(one.failed)]),
        ["", "num", "", ...Array(6).fill("num")])));
  }
  return found;
}

function failureTable(data, show) {
  if (!data.failures.length) return null;
  return section("Failures", table(["how often", "outcome", "message", "environment", ""],
    data.failures.map((one) => [whole(one.count), one.outcome.replaceAll("_", " "), h("span", { class: "message" }, one.message || "no message"), one.env,
      h("a", { href: "#episodes", onclick: (event) => { event.preventDefault(); show(one); } }, "show")]),
    ["num", "", "", "", ""]));
}

function aboutView(data) {
  return h("div", {},
    section("Run", table(["", ""], [["kind", data.kind], ["started", data.created], ["state", data.state], ...Object.entries(data.about)])),
    section("Versions", table(["package", "version"], Object.entries(data.versions))),
    data.config ? section("Settings (config.yaml)", textBlock(data.config)) : null,
    section("Manifest", textBlock(data.manifest)));
}
