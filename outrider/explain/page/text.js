// The text view of one finished generation: its tokens by origin, and plain decoding beside it.
import { clock, count, el, replace } from "./dom.js";
import { legendOf } from "./marks.js";
import { TokenText } from "./tokens.js";

export function figuresOf(stats) {
  const facts = [
    ["tokens a second", stats.tokens_per_s.toFixed(1)],
    ["accepted length", stats.mean_accepted.toFixed(2)],
    ["steps", `${stats.steps} for ${count(stats.new_tokens, "token")}`],
    ["first token", `${Math.round(stats.ttft_ms)} ms`],
    ["candidates", `${stats.drafted}, ${stats.wasted} wasted`],
  ];
  return el("dl", { class: "figures" }, facts.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export class TextView {
  constructor(reading, onOpen) {
    this.reading = reading;
    const { doc } = reading;
    this.fast = new TokenText(onOpen);
    this.fast.show(reading);
    this.node = el("section", { class: "view text-view" },
      doc.prompt ? el("div", { class: "bubble user" }, doc.prompt) : null,
      legendOf(reading),
      this.beside(doc),
      figuresOf(doc.stats));
  }

  beside(doc) {
    this.fastClock = el("output", { class: "clock" }, clock(this.lastOf(this.fastTimes())));
    const fast = el("div", { class: "bubble answer" }, el("div", { class: "column-head" },
      el("strong", {}, doc.method), this.fastClock), this.fast.node);
    if (!doc.plain) return el("div", { class: "columns" }, fast);
    this.plainText = el("div", { class: "tokens" }, doc.plain.pieces.map((piece) => el("span", {}, piece)));
    this.plainClock = el("output", { class: "clock" }, clock(this.lastOf(doc.plain.ended_s)));
    this.plainColumn = el("div", { class: "bubble answer plain", hidden: true }, el("div", { class: "column-head" },
      el("strong", {}, "plain"), this.plainClock), this.plainText);
    this.verdict = el("p", { class: "verdict", role: "status" });
    this.say(doc.plain.identical, doc.plain.same);
    this.replay = el("button", { type: "button", onclick: () => this.play(), hidden: true }, "▶ Replay both");
    const box = el("input", { type: "checkbox", onchange: () => this.toggle(box.checked) });
    return [
      el("div", { class: "controls" }, el("label", { class: "switch" }, box, "plain decoding beside it"), this.replay,
        this.verdict),
      el("div", { class: "columns" }, fast, this.plainColumn),
    ];
  }

  say(identical, same) {
    const total = this.reading.doc.plain.pieces.length;
    replace(this.verdict, same ? `✓ identical: all ${count(total, "token")}` :
      `identical so far: ${count(identical, "token")}`);
  }

  toggle(on) {
    this.plainColumn.hidden = !on;
    this.replay.hidden = !on;
    this.node.classList.toggle("both", on);
  }

  fastTimes() {
    return this.reading.tokens.map((token) => token.ended ?? 0);
  }

  lastOf(times) {
    return times.length ? times[times.length - 1] : 0;
  }

  // Both runs again, each at the speed that it had.
  play() {
    const { plain } = this.reading.doc;
    const spans = [this.fast.text.children, this.plainText.children];
    const times = [this.fastTimes(), plain.ended_s];
    const clocks = [this.fastClock, this.plainClock];
    const shown = [0, 0];
    for (const list of spans) for (const span of list) span.classList.add("to-come");
    const begun = performance.now();
    const token = (this.token = {}); // a second start ends the first
    const frame = () => {
      if (this.token !== token) return;
      const now = (performance.now() - begun) / 1e3;
      times.forEach((list, i) => {
        while (shown[i] < list.length && list[shown[i]] <= now) {
          spans[i][shown[i]]?.classList.remove("to-come");
          shown[i] += 1;
        }
        replace(clocks[i], clock(Math.min(now, this.lastOf(list))));
      });
      const ended = times.every((list, i) => shown[i] >= list.length);
      this.say(Math.min(shown[0], shown[1], plain.identical), ended && plain.same);
      if (!ended) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }
}
