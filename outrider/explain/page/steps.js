// The steps view: a scrubber through one request, and for each step its tree, its times, its costs and why.
import { clock, count, el, millis, replace, svg } from "./dom.js";
import { legendOf, markOf } from "./marks.js";
import { curveAt, whySentence } from "./reading.js";
import { treeOf } from "./tree.js";

const BEFORE = 48; // tokens of text before the step's that are shown
const KEY = ["✓ accepted", "✗ rejected", "★ the target's own token", "· behind a rejected one: not looked at",
  "q: the drafter's guess", "p: the target's probability"];
const PLAY_MS = 350;
const WIDE = 600; // units of the drawings' width

export class StepsView {
  constructor(reading) {
    this.reading = reading;
    this.at = 0;
    const { steps } = reading;
    this.scale = quantile(steps.map((step) => step.draft_s + step.verify_s + step.host_s), 0.98) * 1.1 || 1;
    this.range = el("input", { type: "range", class: "scrubber", min: 0, max: Math.max(steps.length - 1, 0), value: 0,
      "aria-label": "Step", oninput: () => this.show(Number(this.range.value)) });
    this.playing = el("button", { type: "button", "aria-label": "Play", onclick: () => this.play() }, "▶");
    this.where = el("output", { class: "where", role: "status" });
    this.cursor = svg("rect", { class: "cursor", y: 0, height: 40, width: 3 });
    this.text = el("div", { class: "tokens" });
    this.tree = el("div", { class: "scroll tree-frame", tabindex: "0", "aria-label": "Tree of the step" });
    this.times = el("div", { class: "times" });
    this.curve = el("div", {});
    this.why = el("div", { class: "why" });
    const leftOut = reading.trace.left_out;
    this.node = el("section", { class: "view steps-view", onkeydown: (event) => this.key(event) },
      steps.length === 0 ? el("p", {}, "This text has no trace: ask for it with trace=True.") : [
        el("div", { class: "transport" },
          el("button", { type: "button", "aria-label": "First step", onclick: () => this.show(0) }, "«"),
          el("button", { type: "button", "aria-label": "Step back", onclick: () => this.show(this.at - 1) }, "‹"),
          this.playing,
          el("button", { type: "button", "aria-label": "Step on", onclick: () => this.show(this.at + 1) }, "›"),
          el("button", { type: "button", "aria-label": "Last step",
            onclick: () => this.show(steps.length - 1) }, "»"),
          this.where),
        el("div", { class: "track" }, this.overview(), this.range),
        leftOut ? el("p", { class: "faint" }, `${count(leftOut, "later step")} did not fit into the trace.`) : null,
        legendOf(reading),
        el("div", { class: "strip" }, this.text),
        panel("The tree", this.tree, el("ul", { class: "faint key" }, KEY.map((line) => el("li", {}, line)))),
        el("div", { class: "pair" }, panel("Time of the step", this.times), panel("Rows on the cost curve", this.curve)),
        panel("Why this many candidates", this.why),
      ]);
    if (steps.length) this.show(0);
  }

  // Tokens that each step brought, as one drawing; a click goes there.
  overview() {
    const { steps } = this.reading;
    const most = Math.max(...steps.map((step) => step.emitted.length), 1);
    const wide = WIDE / steps.length;
    let bars = "";
    steps.forEach((step, i) => {
      const high = (36 * step.emitted.length) / most;
      bars += `M${(i * wide).toFixed(2)} 40V${(40 - high).toFixed(2)}h${(wide * 0.9).toFixed(2)}V40z`;
    });
    return svg("svg", { class: "overview", viewBox: `0 0 ${WIDE} 40`, preserveAspectRatio: "none", "aria-hidden": "true",
      onclick: (event) => {
        const box = event.currentTarget.getBoundingClientRect();
        this.show(Math.floor(((event.clientX - box.left) / box.width) * steps.length));
      } }, svg("path", { class: "bars", d: bars }), this.cursor);
  }

  key(event) {
    if (event.target === this.range || event.target === this.tree) return;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (move) this.show(this.at + move);
    else if (event.key === "Home") this.show(0);
    else if (event.key === "End") this.show(this.reading.steps.length - 1);
    else return;
    event.preventDefault();
  }

  play() {
    if (this.timer) return this.stop();
    if (this.at >= this.reading.steps.length - 1) this.show(0);
    replace(this.playing, "❚❚");
    this.timer = setInterval(() => {
      if (this.at >= this.reading.steps.length - 1 || !this.node.isConnected) this.stop();
      else this.show(this.at + 1);
    }, PLAY_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    replace(this.playing, "▶");
  }

  show(number) {
    const { steps } = this.reading;
    this.at = Math.min(Math.max(number, 0), steps.length - 1);
    const step = steps[this.at];
    this.range.value = this.at;
    this.range.setAttribute("aria-valuetext", `step ${this.at + 1}, ${count(step.emitted.length, "token")}`);
    this.cursor.setAttribute("x", ((this.at + 0.5) * WIDE) / steps.length - 1.5);
    replace(this.where, `step ${this.at + 1} of ${steps.length} · ${count(step.emitted.length, "token")} · `,
      `ended after ${clock(step.ended_s)}`);
    replace(this.text, ...this.words(step));
    replace(this.tree, treeOf(this.reading, step));
    replace(this.times, ...timesOf(step, this.scale));
    replace(this.curve, curveOf(step, curveAt(this.reading, this.at)));
    replace(this.why, ...whyOf(step));
  }

  words(step) {
    const { tokens } = this.reading;
    const from = Math.max(step.first - BEFORE, 0);
    const span = (token, now) => el("span", { class: `${markOf(token.drafter, token.depth)}${now ? " now" : ""}` },
      token.text);
    return [
      from > 0 ? el("span", { class: "faint" }, "… ") : null,
      ...tokens.slice(from, step.first).map((token) => span(token, false)),
      ...tokens.slice(step.first, step.first + step.emitted.length).map((token) => span(token, true)),
    ];
  }
}

function panel(title, ...children) {
  return el("section", { class: "panel" }, el("h2", {}, title), ...children);
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] : 0;
}

function timesOf(step, scale) {
  const parts = [["draft", step.draft_s], ["verify", step.verify_s], ["host", step.host_s]];
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const wide = Math.max(scale, total, step.floor_s ?? 0, step.expected_s ?? 0);
  const unit = (seconds) => (WIDE * seconds) / wide;
  let left = 0;
  const bars = parts.map(([name, seconds]) => {
    const bar = svg("rect", { class: `time ${name}`, x: left, y: 14, width: unit(seconds), height: 26 },
      svg("title", {}, `${name} ${millis(seconds)}`));
    left += unit(seconds);
    return bar;
  });
  const mark = (seconds, name) => seconds === null ? null : svg("g", { class: `mark ${name}` },
    svg("line", { x1: unit(seconds), x2: unit(seconds), y1: 4, y2: 50 }), svg("title", {}, `${name} ${millis(seconds)}`));
  const facts = [...parts, ["total", total]];
  if (step.floor_s !== null) facts.push(["floor", step.floor_s]);
  if (step.expected_s !== null) facts.push(["expected", step.expected_s]);
  return [
    svg("svg", { viewBox: `0 0 ${WIDE} 54`, class: "bar", role: "img", preserveAspectRatio: "none",
      "aria-label": facts.map(([name, seconds]) => `${name} ${millis(seconds)}`).join(", ") },
    ...bars, mark(step.floor_s, "floor"), mark(step.expected_s, "expected")),
    el("dl", { class: "figures" }, facts.map(([name, seconds]) => el("div", {},
      el("dt", {}, el("span", { class: `swatch ${name}` }), name), el("dd", {}, millis(seconds))))),
    step.floor_s === null ? null : el("p", { class: "faint" },
      "floor: what the cost model says of a step without candidates; expected: of this one. Both without drafting."),
  ];
}

function curveOf(step, curve) {
  if (!curve) return el("p", { class: "faint" }, "This method keeps no cost model.");
  const candidates = step.rows - step.batch;
  const seconds = curve.seconds;
  const took = step.verify_s + step.host_s;
  const widest = Math.max(seconds.length - 1, candidates, 1);
  const most = Math.max(...seconds, took) * 1.15;
  const [left, bottom, high] = [64, 150, 136];
  const x = (number) => left + ((WIDE - left - 16) * number) / widest;
  const y = (value) => bottom - (high * value) / most;
  const line = seconds.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const ticks = [0, Math.round(widest / 2), widest];
  return svg("svg", { viewBox: `0 0 ${WIDE} 186`, class: "curve", role: "img",
    "aria-label": `${candidates} candidates in the pass took ${millis(took)}` },
  svg("line", { class: "axis", x1: left, x2: WIDE - 16, y1: bottom, y2: bottom }),
  svg("line", { class: "axis", x1: left, x2: left, y1: bottom - high, y2: bottom }),
  ticks.map((tick) => svg("text", { x: x(tick), y: bottom + 18, class: "tick" }, tick)),
  svg("text", { x: (left + WIDE) / 2, y: bottom + 34, class: "tick" }, "candidates in the pass"),
  [0, most / 1.15].map((value) => svg("text", { x: left - 6, y: y(value) + 4, class: "tick end" }, millis(value))),
  svg("path", { class: "line", d: line }),
  svg("line", { class: "drop", x1: x(candidates), x2: x(candidates), y1: y(took), y2: bottom }),
  svg("circle", { class: "point", cx: x(candidates), cy: y(took), r: 6 }),
  svg("text", { class: "point-label", x: x(candidates) + (candidates > widest / 2 ? -10 : 10), y: y(took) - 10,
    "text-anchor": candidates > widest / 2 ? "end" : "start" }, `${candidates}: took ${millis(took)}`));
}

function whyOf(step) {
  const { budget } = step;
  const others = step.batch > 1 ? ` The pass had ${step.rows} rows of ${count(step.batch, "sequence")}.` : "";
  const facts = [
    ["allowed", `${budget.nodes} candidates, ${budget.depth} deep`],
    ["room", budget.room_depth < 0 ? "none" : `${budget.room_nodes} candidates, ${budget.room_depth} deep`],
    ["offered", budget.offered], ["verified", budget.verified],
    ["accepted", Math.min(step.path.length, step.emitted.length)], ["text before", count(step.context, "token")],
  ];
  return [el("p", {}, whySentence(step) + others),
    el("dl", { class: "figures" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))];
}
