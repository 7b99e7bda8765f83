// Data sources, navigation and live updates.

const LIVE = document.body.dataset.live === "1";
const EVERY = 2000; // milliseconds between requests to a live server

async function unpack(id) {
  const element = document.getElementById(id);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function asRows(table_) {
  return table_.rows.map((cells) => Object.fromEntries(table_.columns.map((name, i) => [name, cells[i]])));
}

// A file: everything is in the page, episodes in blocks that are unpacked when one of theirs is opened.
async function fileSource() {
  const listed = await unpack("rows");
  const place = new Map();
  let at = 0;
  listed.blocks.forEach((count, block) => {
    for (let i = 0; i < count; i += 1) place.set(listed.rows[at++][0], [block, i]);
  });
  const held = new Map();
  return {
    overview: () => unpack("overview"),
    timeline: () => unpack("timeline"),
    rows: asRows(listed),
    async body(n) {
      if (!place.has(n)) throw new Error("This episode is not in the file.");
      const [block, index] = place.get(n);
      if (!held.has(block)) {
        if (held.size > 4) held.delete(held.keys().next().value);
        held.set(block, unpack(`block-${block}`));
      }
      return (await held.get(block))[index];
    },
  };
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status === 404 ? "This episode no longer exists: the run was rewound." : `The server answered ${answer.status}.`);
  return answer.json();
}

function liveSource() {
  return {
    overview: (seen) => ask(`/api/overview?seen=${encodeURIComponent(seen ?? "")}`),
    timeline: () => ask("/api/timeline"),
    rows: [],
    more: (from) => ask(`/api/rows?from=${from}`),
    body: (n) => ask(`/api/episode/${n}`),
  };
}

async function start() {
  const source = LIVE ? liveSource() : await fileSource();
  const state = { data: await source.overview(), rows: source.rows, epoch: 0, timeline: null };
  const app = document.getElementById("app");
  const main = h("main", {});
  const status = h("span", { class: "status", role: "status" });
  const detail = h("div", { class: "detail" }, h("p", { class: "empty" }, "Select an episode."));
  const list = episodeList(state, (n) => { location.hash = `#episodes/${n}`; });
  const episodes = h("div", { class: "episodes" }, list.element, detail);
  const nav = h("nav", { class: "main", "aria-label": "pages" },
    [["overview", "Overview"], ["episodes", "Episodes"], ["timeline", "Timeline"], ["about", "Settings"]].map(([key, name]) => h("a", { href: `#${key}`, data: { key } }, name)));
  app.replaceChildren(
    h("header", { class: "top" }, h("h1", {}, shorten(state.data.name, 100)), h("span", { class: "about" }, [state.data.about.environment, state.data.about.agent].filter(Boolean).map((text) => shorten(text, 100)).join(" \u00b7 ")), h("span", { class: "grow" }), status, nav),
    main);

  const byId = (id) => state.rows.find((row) => row.id === id);
  const openId = (id) => {
    const row = byId(id);
    if (row) location.hash = `#episodes/${row.n}`;
    else {
      list.only({ text: id });
      location.hash = "#episodes";
    }
  };
  const openFailure = (one) => {
    list.only({ outcome: one.outcome });
    location.hash = state.rows.some((row) => row.n === one.episode) ? `#episodes/${one.episode}` : "#episodes";
  };
  const siblingsOf = (row) => (row.group ? state.rows.filter((other) => other.group === row.group && other.step === row.step && other.env === row.env && other.entry === row.entry) : [row]);

  let asked = 0;
  async function showEpisode(n, mode) {
    const row = state.rows.find((one) => one.n === n);
    list.choose(n);
    const mine = (asked += 1);
    try {
      const body = await source.body(n);
      if (mine !== asked) return;
      const siblings = siblingsOf(row);
      detail.replaceChildren(episodeView(body, row, siblings, mode ?? "turns", source.body));
    } catch (error) {
      if (mine === asked) detail.replaceChildren(h("p", { class: "empty" }, error.message));
    }
  }

  async function showTimeline() {
    state.timeline = state.timeline ?? (await source.timeline());
    if (page_() === "timeline") main.replaceChildren(timelineView(state.timeline, openId));
  }

  const page_ = () => location.hash.slice(1).split("/")[0] || "overview";
  function route() {
    const [page, n, mode] = location.hash.slice(1).split("/");
    const here = ["episodes", "timeline", "about"].includes(page) ? page : "overview";
    for (const link of nav.children) {
      if (link.dataset.key === here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.body.dataset.page = here;
    if (here === "episodes") {
      if (episodes.parentNode !== main) main.replaceChildren(episodes);
      list.update();
      if (/^\d+$/.test(n ?? "")) showEpisode(Number(n), mode);
    } else if (here === "timeline") showTimeline();
    else if (here === "about") main.replaceChildren(aboutView(state.data));
    else main.replaceChildren(overviewView(state.data, state.rows, openFailure));
  }

  function say(text, kind) {
    status.textContent = visible(text);
    status.className = `status ${kind ?? ""}`;
  }

  async function takeRows() {
    if (state.epoch !== state.data.epoch) {
      state.rows.length = 0;
      state.epoch = state.data.epoch;
    }
    while (state.rows.length < state.data.episodes) {
      const more = await source.more(state.rows.length);
      if (more.epoch !== state.epoch || !more.rows.length) break;
      state.rows.push(...asRows(more));
    }
  }

  async function follow() {
    try {
      const found = await source.overview(state.data.tag);
      if (!found.same) {
        state.data = found;
        await takeRows();
        if (page_() === "episodes") list.update();
        else if (!["timeline", "about"].includes(page_())) {
          const at = scrollY;
          route();
          scrollTo(0, at);
        }
        state.timeline = null;
      }
      say(found.same ? `${state.data.state} \u00b7 live` : `updated \u00b7 live`, "live");
    } catch (error) {
      say(`not connected: ${error.message}`, "lost");
    }
    setTimeout(follow, EVERY);
  }

  addEventListener("hashchange", () => { scrollTo(0, 0); route(); });
  say(state.data.state);
  if (LIVE) {
    await takeRows();
    setTimeout(follow, EVERY);
  }
  route();
}

start().catch((error) => {
  document.getElementById("app").replaceChildren(h("p", { class: "note warn" }, `Cannot render the page: ${error.message}`));
});
