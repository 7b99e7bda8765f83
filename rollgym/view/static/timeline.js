// The scheduler's timeline: lanes on a canvas, drawn for the part of time that is in view.

const LEFT = 130, HEAD = 26;
const STATES = { generating: "--blue", stepping: "--green", resetting: "--orange", opening: "--purple" };
const ROLES = { 1: "engine", 2: "environments", 3: "waiting for an environment" };

function timelineView(data, open) {
  if (!data || !data.lanes.length) {
    return h("p", { class: "empty" }, "No events were recorded.");
  }
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "timeline of the scheduler" });
  const tip = h("div", { class: "tip", role: "status" });
  const whole_ = [data.begin, data.begin + Math.max(data.seconds, 1e-3)];
  const view = { from: whole_[0], to: whole_[1], drag: null };
  const lanes = data.lanes;
  const LANE = lanes.length <= 40 ? 16 : lanes.length <= 90 ? 9 : 6;
  const named = Math.ceil(13 / LANE); // every so many lanes there is room for a name
  const offsets = [];
  for (let i = 0, heads = 0, first = 0; i < lanes.length; i += 1) {
    if (i === 0 || lanes[i - 1].role !== lanes[i].role) [heads, first] = [heads + 1, i];
    offsets.push({ y: HEAD + i * LANE + heads * 24, named: (i - first) % named === 0, heads: i === first });
  }
  let drawnWidth = 0;

  const x = (t) => LEFT + ((t - view.from) / (view.to - view.from)) * (drawnWidth - LEFT - 8);
  const time = (px) => view.from + ((px - LEFT) / (drawnWidth - LEFT - 8)) * (view.to - view.from);
  const top = (index) => offsets[index].y;

  function draw() {
    const scale = devicePixelRatio || 1;
    drawnWidth = Math.max(400, canvas.parentNode?.clientWidth ?? 900);
    const height = top(lanes.length - 1) + LANE + 10;
    canvas.style.width = `${drawnWidth}px`;
    canvas.style.height = `${height}px`;
    canvas.width = drawnWidth * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const [ink, soft, faint] = [theme("--ink"), theme("--soft"), theme("--line")];
    const colors = Object.fromEntries(Object.entries(STATES).map(([state, name]) => [state, theme(name)]));
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    for (const at of ticks(view.from, view.to, Math.max(3, Math.floor(drawnWidth / 110)))) {
      pen.fillStyle = faint;
      pen.fillRect(x(at), HEAD - 6, 1, height);
      pen.fillStyle = soft;
      pen.fillText(`${number(at, 5)} s`, x(at), 10);
    }
    lanes.forEach((lane, index) => {
      const y = top(index);
      pen.textAlign = "left";
      if (offsets[index].heads) {
        pen.fillStyle = ink;
        pen.font = "600 11px system-ui, sans-serif";
        pen.fillText(ROLES[lane.role] ?? "", 2, y - 13);
        pen.font = "11px system-ui, sans-serif";
      }
      pen.fillStyle = soft;
      if (offsets[index].named) pen.fillText(shorten(visible(lane.name), 20), 2, y + LANE / 2);
      for (const [start, length, state] of lane.spans) {
        if (start > view.to || start + length < view.from) continue;
        const a = Math.max(LEFT, x(start)), b = Math.min(drawnWidth - 8, x(start + length));
        pen.fillStyle = colors[state] ?? soft;
        const gap = LANE > 10 ? 2 : 0.5;
        pen.fillRect(a, y + gap, Math.max(0.6, b - a - (b - a > 3 ? 0.5 : 0)), LANE - 2 * gap);
      }
    });
    pen.setLineDash([3, 3]);
    pen.strokeStyle = soft;
    for (const [at] of data.marks) {
      if (at < view.from || at > view.to) continue;
      pen.beginPath();
      pen.moveTo(x(at), HEAD - 6);
      pen.lineTo(x(at), height);
      pen.stroke();
    }
    pen.setLineDash([]);
    if (view.drag) {
      pen.fillStyle = "rgba(86, 180, 233, 0.25)";
      pen.fillRect(Math.min(...view.drag), HEAD - 6, Math.abs(view.drag[1] - view.drag[0]), height);
    }
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect();
    const t = time(event.clientX - box.left), y = event.clientY - box.top;
    const index = lanes.findIndex((_, i) => y >= top(i) && y < top(i) + LANE);
    if (index < 0) return null;
    const slack = (1.5 * (view.to - view.from)) / drawnWidth;
    return lanes[index].spans.find(([start, length]) => t >= start - slack && t <= start + length + slack) ?? null;
  }

  canvas.addEventListener("pointermove", (event) => {
    if (view.drag) {
      view.drag[1] = event.clientX - canvas.getBoundingClientRect().left;
      return draw();
    }
    const found = hit(event);
    tip.classList.toggle("on", Boolean(found));
    if (!found) return;
    const [start, length, state, episode, turn, count] = found;
    tip.replaceChildren(...[count > 1 ? `${whole(count)} short spans, ${state}` : `${state}, turn ${turn + 1}`, shorten(episode, 80), `${seconds(length)}, at ${number(start, 6)} s`].map((line) => h("div", {}, line)));
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 12)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  canvas.addEventListener("pointerleave", () => tip.classList.remove("on"));
  canvas.addEventListener("pointerdown", (event) => {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    if (at < LEFT) return;
    view.drag = [at, at];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const drag = view.drag;
    view.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 6) {
      [view.from, view.to] = drag.map(time).sort((a, b) => a - b);
    } else if (drag) {
      const found = hit(event);
      if (found) open(found[3]);
    }
    draw();
  });
  const reset = () => { [view.from, view.to] = whole_; draw(); };
  canvas.addEventListener("dblclick", reset);
  const zoom = (factor) => {
    const middle = (view.from + view.to) / 2, half = ((view.to - view.from) / 2) * factor;
    view.from = Math.max(whole_[0], middle - half);
    view.to = Math.min(whole_[1], middle + half);
    draw();
  };
  const holder = h("div", { class: "lane-box" }, canvas);
  new ResizeObserver(draw).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const waits = data.longest_waits.map((wait) => [
    h("button", { type: "button", class: "link", onclick: () => { const pad = wait.seconds * 0.5 + 1e-3; [view.from, view.to] = [Math.max(whole_[0], wait.at - pad), Math.min(whole_[1], wait.at + wait.seconds + pad)]; draw(); canvas.scrollIntoView({ block: "center" }); } }, seconds(wait.seconds)),
    wait.for, h("a", { href: "#episodes", onclick: (event) => { event.preventDefault(); open(wait.episode); } }, shorten(wait.episode, 60)),
    whole(wait.state === "closing" ? wait.turn : wait.turn + 1), `${number(wait.at, 5)} s`,
  ]);
  return h(
    "div",
    { class: "timeline" },
    h("div", { class: "cards" },
      card("time recorded", seconds(data.seconds)), card("episodes played", whole(data.episodes), "evaluations and demonstrations included"),
      card("engine busy", percent(data.engine_busy), "at least one episode generating"), card("environments busy", percent(data.environment_busy), "at least one episode stepping")),
    data.left_out ? h("p", { class: "note" }, `Only the later part of the run is drawn: its first ${whole(data.left_out)} events are left out.`) : null,
    data.lanes_left_out ? h("p", { class: "note" }, `${whole(data.lanes_left_out)} more lanes are not drawn.`) : null,
    section("Longest waits", table(["duration", "waited for", "episode", "turn", "at"], waits, ["num", "", "", "num", "num"])),
    section("Time by state", bars(data.time_by_state, seconds)),
    section("Lanes",
      h("div", { class: "keys" }, Object.entries(STATES).map(([state, name]) => h("span", {}, h("i", { class: "swatch", style: { "background-color": `var(${name})` } }), state)),
        h("span", { class: "small" }, "dashed: new weights, pauses. Drag to look closer, double-click for all, click a span for its episode."),
        h("span", { class: "grow" }),
        h("button", { type: "button", onclick: () => zoom(0.5) }, "closer"), h("button", { type: "button", onclick: () => zoom(2) }, "wider"), h("button", { type: "button", onclick: reset }, "all")),
      holder),
    tip,
  );
}
