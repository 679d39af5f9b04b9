// The fleet view: what the server does for everybody, read once a second.
import { clock, count, el, millis, replace, svg } from "./dom.js";
import { getJson } from "./server.js";

const EVERY_MS = 1000;
const KEPT = 120; // readings in a drawing
const WIDE_CHART = 600;
const HIGH_CHART = 90;

export class FleetView {
  constructor() {
    this.past = [];
    this.tiles = el("dl", { class: "figures tiles" });
    this.heat = el("div", { class: "scroll" });
    this.queue = el("div", {});
    this.gaps = el("div", {});
    this.strips = el("div", { class: "strips" });
    this.saved = el("div", {});
    this.trouble = el("p", { class: "trouble", role: "alert" });
    this.node = el("section", { class: "view fleet-view" }, stripes(), this.trouble,
      section("Now", this.tiles),
      section("What speculation saved today", this.saved),
      section("Acceptance by drafter and depth", this.heat),
      el("div", { class: "pair" }, section("Running and waiting", this.queue), section("Gaps between tokens", this.gaps)),
      section("Sequences", this.strips));
  }

  open() {
    if (!this.timer) this.timer = setInterval(() => this.look(), EVERY_MS);
    this.look();
  }

  async look() {
    if (!this.node.isConnected) {
      clearInterval(this.timer);
      this.timer = null;
      return;
    }
    if (this.looking || document.hidden) return;
    this.looking = true;
    try {
      this.show(await getJson("/v1/outrider/fleet"), performance.now() / 1e3);
      replace(this.trouble);
    } catch (error) {
      replace(this.trouble, error.message);
    } finally {
      this.looking = false;
    }
  }

  show(fleet, now) {
    const { stats } = fleet;
    this.past.push({ now, tokens: stats.new_tokens ?? 0, running: stats.running, waiting: stats.waiting,
      gap: stats.fleet?.gap_p50_s ?? null, worst: stats.fleet?.gap_p99_s ?? null });
    this.past = this.past.slice(-KEPT);
    const first = this.past[Math.max(this.past.length - 6, 0)];
    const rate = now > first.now ? ((stats.new_tokens ?? 0) - first.tokens) / (now - first.now) : 0;
    replace(this.tiles, tilesOf(fleet, Math.max(rate, 0)));
    replace(this.saved, savedOf(stats));
    replace(this.heat, heatOf(stats.acceptance ?? {}));
    replace(this.queue, chart([["running", this.past.map((one) => one.running)],
      ["waiting", this.past.map((one) => one.waiting)]], (value) => String(Math.round(value))));
    replace(this.gaps, chart([["half of them below", this.past.map((one) => one.gap)],
      ["99 of 100 below", this.past.map((one) => one.worst)]], millis));
    replace(this.strips, stripsOf(fleet.sequences));
  }
}

function section(title, ...children) {
  return el("section", { class: "panel" }, el("h2", {}, title), ...children);
}

function tilesOf({ info, stats }, rate) {
  const facts = [["model", info.model], ["method", info.method], ["running", `${stats.running} of ${info.slots}`],
    ["waiting", stats.waiting], ["tokens a second", rate.toFixed(1)], ["requests", stats.requests ?? 0],
    ["prompt tokens reused", share(stats.cached_tokens, stats.prompt_tokens)]];
  if (stats.cache_blocks) facts.push(["cache in use", share(stats.cache_blocks_used, stats.cache_blocks)]);
  return facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

function share(part, whole) {
  return whole ? `${Math.round((100 * (part ?? 0)) / whole)}%` : "none yet";
}

function savedOf(stats) {
  const today = stats.fleet?.today ?? {};
  const [tokens, steps, saved] = [today.tokens ?? 0, today.passes ?? 0, today.saved_s ?? 0];
  if (!tokens) return el("p", { class: "faint" }, "Nothing was generated today.");
  const length = tokens / Math.max(steps, 1);
  return [
    el("p", { class: "big" }, saved >= 0 ? `about ${duration(saved)} of decoding` : `nothing: it cost ${duration(-saved)}`),
    el("p", { class: "faint" }, `${count(tokens, "token")} came in ${count(steps, "pass")}`.replace("passs", "passes"),
      ` of a sequence, ${length.toFixed(2)} a pass; plain decoding takes one a token. Against what the cost model says `,
      "of passes without candidates."),
  ];
}

function duration(seconds) {
  return seconds < 120 ? clock(seconds) : seconds < 7200 ? `${(seconds / 60).toFixed(1)} minutes` :
    `${(seconds / 3600).toFixed(1)} hours`;
}

// Shade and number in each cell: what the shade says can be read, too.
function heatOf(acceptance) {
  const drafters = Object.keys(acceptance).sort();
  if (!drafters.length) return el("p", { class: "faint" }, "Nothing was drafted yet.");
  const deepest = Math.max(...drafters.flatMap((name) => Object.keys(acceptance[name]).map(Number)));
  const depths = Array.from({ length: Math.min(deepest, 16) }, (_, i) => i + 1);
  const cell = (name, depth) => {
    const [offered, accepted] = acceptance[name][depth] ?? [0, 0];
    if (!offered) return el("td", { class: "none" }, "–");
    const rate = accepted / offered;
    return el("td", { class: `heat h${Math.round(rate * 10)}`, title: `${accepted} of ${offered} at depth ${depth}` },
      `${Math.round(100 * rate)}%`);
  };
  const about = "Share accepted of what a drafter had at a depth, where the one before was accepted";
  return [el("p", { class: "faint" }, about), el("table", { class: "heat-map", "aria-label": about },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "drafter"),
      depths.map((depth) => el("th", { scope: "col" }, depth)))),
    el("tbody", {}, drafters.map((name) => el("tr", {}, el("th", { scope: "row" }, name),
      depths.map((depth) => cell(name, depth))))))];
}

function chart(lines, say) {
  const all = lines.flatMap(([, values]) => values).filter((value) => value !== null && value !== undefined);
  const most = Math.max(...all, 1e-9);
  const path = (values) => {
    let pen = "M";
    return values.map((value, i) => {
      if (value === null || value === undefined) return "";
      const x = (WIDE_CHART * (i + KEPT - values.length)) / (KEPT - 1);
      const y = HIGH_CHART - 4 - ((HIGH_CHART - 12) * value) / most;
      const point = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
      return point;
    }).join("");
  };
  const now = lines.map(([name, values]) => [name, values.at(-1)]);
  return [
    svg("svg", { class: "chart", viewBox: `0 0 ${WIDE_CHART} ${HIGH_CHART}`, preserveAspectRatio: "none", role: "img",
      "aria-label": now.map(([name, value]) => `${name} ${say(value ?? 0)}`).join(", ") },
    lines.map(([, values], i) => svg("path", { class: `chart-line l${i}`, d: path(values) }))),
    el("ul", { class: "key" }, now.map(([name, value], i) => el("li", {}, el("span", { class: `swatch-line l${i}` }),
      `${name}: `, el("strong", {}, value === null || value === undefined ? "–" : say(value))))),
  ];
}

// A sequence is a strip: what of its prompt was there already, the rest of the prompt, what it has said.
function stripsOf(sequences) {
  if (!sequences.length) return el("p", { class: "faint" }, "Nobody asks at the moment.");
  const longest = Math.max(...sequences.map((one) => one.prompt_tokens + one.new_tokens), 1);
  const part = (left, tokens, name, word) => tokens > 0 ? svg("rect", { class: `strip-part ${name}`,
    fill: name === "reused" ? "url(#hatch)" : null, x: (WIDE_CHART * left) / longest, y: 0, height: 18, width: Math.max((WIDE_CHART * tokens) / longest, 1) },
  svg("title", {}, `${tokens} ${word}`)) : null;
  return [
    el("ul", { class: "key" }, [["reused", "prompt, reused"], ["prompt", "prompt"], ["new", "said"]].map(([name, word]) =>
      el("li", {}, svg("svg", { class: "swatch-part", width: 26, height: 12, viewBox: "0 0 26 12" },
        svg("rect", { class: `strip-part ${name}`, fill: name === "reused" ? "url(#hatch)" : null, width: 26, height: 12 })), word))),
    ...sequences.map((one) => {
      const cached = one.cached_tokens ?? 0;
      const words = `${one.prompt_tokens} of the prompt, ${cached} of them reused, ${one.new_tokens} said`;
      return el("div", { class: `sequence${one.running ? "" : " waits"}` },
        el("span", { class: "sequence-name" }, one.running ? `slot ${one.slot}` : "waits", el("span", { class: "faint" },
          ` ${one.method} · ${clock(one.seconds)}`)),
        svg("svg", { class: "strip-bar", viewBox: `0 0 ${WIDE_CHART} 18`, preserveAspectRatio: "none", role: "img",
          "aria-label": words }, part(0, cached, "reused", "of the prompt, reused"),
        part(cached, one.prompt_tokens - cached, "prompt", "of the prompt"),
        part(one.prompt_tokens, one.new_tokens, "new", "said")),
        el("span", { class: "faint sequence-count" }, `${one.prompt_tokens + one.new_tokens}`));
    }),
  ];
}

// For what is reused: stripes, which do not need a colour to be told from the rest.
function stripes() {
  return svg("svg", { class: "hidden", "aria-hidden": "true" }, svg("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, svg("rect", { width: 8, height: 8, class: "hatch-back" }),
  svg("rect", { width: 4, height: 8, class: "hatch-line" })));
}
