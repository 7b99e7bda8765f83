// Episode detail: turns, tokens, siblings and metadata.

function verdict(row) {
  if (row.error || ["env_error", "worker_lost", "engine_error", "cancelled"].includes(row.outcome)) return ["failed", "!"];
  if (row.success === true) return ["good", "\u2713"];
  if (row.success === false) return ["bad", "\u2717"];
  return ["none", "\u00b7"];
}

function badge(row) {
  const [kind, sign] = verdict(row);
  const words = { failed: "failed to run", good: "success", bad: "no success", none: "not scored" }[kind];
  return h("span", { class: `badge ${kind}`, title: words, role: "img", "aria-label": words }, sign);
}

function episodeView(body, row, siblings, mode, go) {
  const tabs = [["turns", "Turns"], ["tokens", "Tokens"], ["group", `Group (${siblings.length})`], ["raw", "Everything"]];
  const facts = [
    ["environment", body.spec.env_id], ["task", [body.spec.split, body.spec.task].filter((x) => x !== null && x !== "").join(" ")],
    ["step", body.step], ["outcome", body.outcome.replaceAll("_", " ")], ["return", number(body.return, 4)],
    ["turns", body.turns.length], ["tokens", row.tokens || null], ["time", seconds(body.seconds)],
    ["attempts", body.attempts > 1 ? body.attempts : null],
    ...(body.roles ?? []).map((role) => [role.name, `${role.player ? `${role.player}, ` : ""}return ${number(role.return, 4)}`]),
  ];
  const shown = { turns: () => turnsView(body), tokens: () => tokenView(body), group: () => groupView(siblings, go), raw: () => textBlock(JSON.stringify(body, null, 1)) };
  return h(
    "article",
    { class: "episode" },
    h("header", {}, badge(row), h("h2", {}, shorten(body.id, 120))),
    h("dl", { class: "facts" }, facts.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, shorten(v, 200))))),
    h("nav", { class: "tabs", "aria-label": "episode" }, tabs.map(([key, name]) =>
      h("a", { href: `#episodes/${row.n}/${key}`, "aria-current": key === mode ? "page" : null }, name))),
    body.error && failureView(body.error),
    (shown[mode] ?? shown.turns)(),
  );
}

function failureView(error) {
  return h("div", { class: "failure" },
    h("strong", {}, shorten(error.type, 100)), textBlock(error.message),
    error.traceback && folded("traceback", () => textBlock(error.traceback)));
}

function roleRewards(turn) {
  return Object.entries(turn.rewards ?? {}).map(([role, reward]) => `${shorten(role, 60)} ${number(reward)}`).join(", ");
}

function turnsView(body) {
  const env = body.spec.env_id;
  const cards = body.turns.map((turn, index) => {
    const seen = index ? body.turns[index - 1].info : body.reset;
    return h(
      "li",
      { class: "turn" },
      h("div", { class: "turn-head" }, h("b", {}, `Turn ${index + 1}`),
        turn.role && h("span", { class: "role" }, shorten(turn.role, 60)),
        turn.info?.valid === false && h("span", { class: "badge bad" }, "invalid action"),
        h("span", { class: "grow" }),
        turn.policy_version !== undefined && h("span", {}, `version ${turn.policy_version}`),
        turn.finish_reason && h("span", {}, turn.finish_reason),
        h("span", { title: "queue, generation, environment" }, turn.seconds.map(seconds).join(" + ")),
        h("span", { class: turn.reward > 0 ? "reward plus" : turn.reward < 0 ? "reward minus" : "reward" }, `reward ${turn.role ? roleRewards(turn) : number(turn.reward)}`)),
      observation(env, turn.observation, seen),
      h("div", { class: "act" }, h("span", { class: "who" }, "action"), action(env, turn.action)),
      turn.response !== undefined && turn.response !== turn.action && folded("full response", () => withCode(turn.response, "said")),
      turn.info && folded("info", () => textBlock(JSON.stringify(turn.info, null, 1))),
    );
  });
  const after = body.turns.length ? body.turns.at(-1).info : body.reset;
  return h(
    "div",
    {},
    body.roles
      ? body.roles.map((role) => folded(`instructions of ${shorten(role.name, 60)}`, () => textBlock(role.instructions)))
      : body.instructions && folded("instructions", () => textBlock(body.instructions)),
    h("ol", { class: "turns" }, lazily(cards)),
    body.final && h("div", { class: "turn final" }, h("div", { class: "turn-head" }, h("b", {}, "Final observation")), observation(env, body.final, after)),
    !body.turns.length && h("p", { class: "empty" }, "No turns."),
  );
}

// The first hundred, and the rest on demand: an episode may have thousands of turns.
function lazily(cards) {
  if (cards.length <= 120) return cards;
  const more = h("li", {}, h("button", { type: "button", class: "more", onclick: () => more.replaceWith(...cards.slice(100)) }, `show ${whole(cards.length - 100)} more turns`));
  return [...cards.slice(0, 100), more];
}

// Siblings of the group side by side.
function groupView(siblings, go) {
  const holder = h("div", { class: "group" });
  const shown = siblings.slice(0, 16);
  for (const row of shown) {
    const column = h("section", { class: "sibling" },
      h("header", {}, badge(row), h("a", { href: `#episodes/${row.n}` }, `member ${row.member}`), h("span", { class: "grow" }), h("span", {}, number(row.total, 4))));
    holder.append(column);
    go(row.n).then((body) => {
      const picture = drawn(body.turns.length ? body.turns.at(-1).info : body.reset);
      const peak = Math.max(0, ...(body.values?.advantages ?? []).map(Math.abs));
      column.append(
        h("p", { class: "small" }, `${body.outcome.replaceAll("_", " ")}, ${body.turns.length} turns`, peak ? `, advantage ${number(body.values.advantages[0])}` : ""),
        picture ?? "",
        h("ol", { class: "moves" }, body.turns.slice(0, 60).map((turn) =>
          h("li", {}, h("span", { class: "move" }, shorten(turn.action, 160)), h("span", { class: turn.reward > 0 ? "reward plus" : turn.reward < 0 ? "reward minus" : "reward" }, number(turn.reward))))),
        body.turns.length > 60 ? h("p", { class: "small" }, `and ${body.turns.length - 60} more turns`) : "",
      );
    }, () => column.append(h("p", { class: "small" }, "not in this file")));
  }
  if (siblings.length > 16) holder.append(h("p", { class: "empty" }, `and ${siblings.length - 16} more`));
  return holder;
}
