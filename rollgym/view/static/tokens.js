// Token view: mask, log-prob, ratio, advantage and policy version of each token.

const MODES = [
  ["mask", "mask", "blue: written by the policy and trained on; plain: written by the environment or template"],
  ["logprob", "log-prob", "darker orange: lower probability when sampled"],
  ["ratio", "ratio", "orange: the update made the token likelier; blue: less likely; plain: as before"],
  ["advantage", "advantage", "green: better than its siblings; orange: worse; plain: neither"],
  ["version", "policy version", "one color for each version of the weights"],
];
const ORANGE = [213, 94, 0], BLUE = [0, 114, 178], GREEN = [0, 158, 115];
const VERSIONS = [BLUE, [230, 159, 0], GREEN, [204, 121, 167], [86, 180, 233], ORANGE];

function shade([r, g, b], strength) {
  const alpha = Math.max(0, Math.min(1, strength)) * 0.7;
  return `rgba(${r}, ${g}, ${b}, ${alpha.toFixed(3)})`;
}

// The color of a token; null is none. largest: the greatest absolute advantage in view.
function tokenColour(mode, token, largest) {
  if (!token.mask) return null;
  if (mode === "mask") return shade(BLUE, 0.5);
  if (mode === "logprob") return token.logprob === undefined ? null : shade(ORANGE, Math.sqrt(Math.max(0, -token.logprob) / 5));
  if (mode === "ratio") {
    if (token.ratio === undefined || token.ratio === null || !(token.ratio > 0)) return null;
    const far = Math.log(token.ratio);
    return shade(far >= 0 ? ORANGE : BLUE, Math.abs(far) / Math.log(1.5));
  }
  if (mode === "advantage") {
    if (token.advantage === undefined || token.advantage === null) return null;
    return shade(token.advantage >= 0 ? GREEN : ORANGE, Math.abs(token.advantage) / (largest || 1));
  }
  return token.version === undefined ? null : shade(VERSIONS[Math.abs(token.version) % VERSIONS.length], 0.6);
}

function tokensOf(body) {
  let own = 0;
  return body.turns.map((turn) => {
    const found = (turn.prompt_ids ?? []).map((id) => ({ id, mask: 0 }));
    const spans = (turn.version_spans ?? []).flatMap(([version, count]) => Array(count).fill(version));
    (turn.action_ids ?? []).forEach((id, i) => {
      found.push({
        id, mask: 1, logprob: turn.logprobs?.[i], version: spans[i] ?? turn.policy_version,
        ratio: body.values?.ratios?.[own], advantage: body.values?.advantages?.[own],
      });
      own += 1;
    });
    return found;
  });
}

function tokenText(token, texts) {
  const text = texts[token.id];
  if (text === undefined) return String(token.id);
  return visible(text).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
}

function tokenWords(token, texts, place) {
  const lines = [`token ${place}, id ${token.id}${texts[token.id] === undefined ? "" : ` ${JSON.stringify(texts[token.id])}`}`];
  lines.push(token.mask ? "written by the policy (mask 1)" : "written by the environment or template (mask 0)");
  if (token.mask) {
    if (token.logprob !== undefined) lines.push(`log-prob ${token.logprob.toFixed(4)} (${percent(Math.exp(token.logprob), 2)})`);
    lines.push(`ratio ${token.ratio === undefined || token.ratio === null ? "not recorded" : token.ratio.toFixed(4)}`);
    lines.push(`advantage ${token.advantage === undefined || token.advantage === null ? "not recorded" : token.advantage.toFixed(4)}`);
    if (token.version !== undefined) lines.push(`policy version ${token.version}`);
  }
  return lines;
}

function tokenView(body) {
  const turns = tokensOf(body), texts = body.texts ?? {};
  if (!turns.some((turn) => turn.length)) {
    return h("p", { class: "empty" }, "No tokens were recorded: the agent has no token ids.");
  }
  const largest = Math.max(1e-9, ...turns.flat().map((token) => Math.abs(token.advantage ?? 0)));
  const tip = h("div", { class: "tip", role: "status" });
  const legend = h("p", { class: "legend" });
  const field = h("div", { class: "tokens" });
  const spans = [];
  let place = 0;
  turns.forEach((turn, index) => {
    const line = h("div", { class: "turn-tokens" }, h("span", { class: "where" }, `turn ${index + 1}${body.turns[index].role ? ` ${shorten(body.turns[index].role, 60)}` : ""}`));
    for (const token of turn) {
      const shown = tokenText(token, texts);
      const span = h("span", { class: token.mask ? "token own" : "token", data: { place: String(place) } }, shown === "" ? "\u2205" : shown);
      span.textContent = span.textContent.replaceAll(" ", "\u00b7");
      spans.push([span, token]);
      place += 1;
      line.append(span, document.createElement("wbr"));
      if (/\n/.test(texts[token.id] ?? "")) line.append(document.createElement("br"));
    }
    field.append(line);
  });
  const choose = (mode) => {
    for (const [span, token] of spans) span.style.backgroundColor = tokenColour(mode, token, largest) ?? "";
    legend.textContent = visible(legendOf(mode, body, largest));
    for (const button of modes.children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  };
  const modes = h("div", { class: "modes", role: "group", "aria-label": "color by" },
    MODES.map(([mode, name]) => h("button", { type: "button", data: { mode }, onclick: () => choose(mode) }, name)));
  field.addEventListener("pointerover", (event) => {
    const found = event.target.dataset?.place === undefined ? null : spans[Number(event.target.dataset.place)];
    if (!found) return tip.classList.remove("on");
    tip.replaceChildren(...tokenWords(found[1], texts, Number(event.target.dataset.place)).map((line) => h("div", {}, shorten(line, 300))));
    const box = event.target.getBoundingClientRect();
    tip.classList.add("on");
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 12))}px`;
    const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  });
  field.addEventListener("pointerleave", () => tip.classList.remove("on"));
  const named = Object.keys(texts).length ? "" : " Ids are shown: the run folder has no tokenizer, or the package tokenizers is not installed.";
  choose("logprob");
  return h("div", { class: "token-view" }, modes, legend, named && h("p", { class: "note" }, named), field, tip);
}

function legendOf(mode, body, largest) {
  const words = MODES.find(([name]) => name === mode)[2];
  if (mode === "logprob") return `${words}; full at \u22125 (0.7 %) and below`;
  const source = body.source ?? {};
  if (mode === "ratio") {
    return source.ratios === "recorded" ? `${words}; full at 1.5 and 0.67` : `Ratios: ${source.ratios ?? "not recorded"}.`;
  }
  if (mode === "advantage") {
    return body.values?.advantages ? `${words}; full at \u00b1${number(largest)}; ${source.advantages}` : `Advantages: ${source.advantages ?? "not recorded"}.`;
  }
  return words;
}
