// A text whose tokens can be looked at: with the mouse, a finger, or the arrow keys.
import { clock, el, percent, replace, shorten, visible } from "./dom.js";
import { factsOf } from "./reading.js";
import { markOf } from "./marks.js";

const SHOWN = 5; // rejected candidates in a note

export class TokenText {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.reading = null;
    this.note = el("div", { class: "note", role: "tooltip", id: `note${TokenText.made++}`, hidden: true });
    this.text = el("div", {
      class: "tokens", role: "group", tabindex: "0",
      "aria-label": "Text by origin. Arrow keys go from token to token, Enter opens the step.",
      onmouseover: (event) => this.look(event.target.closest(".token"), false),
      onmouseleave: () => this.hide(),
      onclick: (event) => this.tap(event),
      onkeydown: (event) => this.key(event),
      onblur: () => this.hide(),
    });
    this.node = el("div", { class: "tokens-frame" }, this.text, this.note);
    this.at = -1;
  }

  show(reading) {
    this.reading = reading;
    this.text.replaceChildren(...reading.tokens.map((token) => this.span(token)));
  }

  // While a text grows: pieces with their origins, before its trace is there.
  append(token) {
    this.text.append(this.span(token));
  }

  clear() {
    this.reading = null;
    this.at = -1;
    this.text.replaceChildren();
    this.hide();
  }

  span(token) {
    return el("span", { class: markOf(token.drafter, token.depth), data: { at: token.at } }, token.text);
  }

  tap(event) {
    const span = event.target.closest(".token");
    if (span) this.look(span, true);
  }

  key(event) {
    const spans = this.text.children;
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 12, ArrowUp: -12 }[event.key];
    if (move && spans.length) {
      this.look(spans[Math.min(Math.max(this.at + move, 0), spans.length - 1)], true);
      spans[this.at]?.scrollIntoView({ block: "nearest" });
      event.preventDefault();
    } else if (event.key === "Enter" && this.reading && this.at >= 0) {
      this.open();
    } else if (event.key === "Escape") {
      this.hide();
    }
  }

  open() {
    const step = this.reading.tokens[this.at]?.step ?? -1;
    if (step >= 0) this.onOpen?.(step, this.reading);
  }

  look(span, keep) {
    if (!span || !this.reading) return;
    this.text.querySelector(".looked")?.classList.remove("looked");
    span.classList.add("looked");
    this.at = Number(span.dataset.at);
    const token = this.reading.tokens[this.at];
    replace(this.note, ...noteOf(this.reading, token, keep && this.onOpen ? () => this.open() : null));
    this.note.hidden = false;
    this.text.setAttribute("aria-describedby", this.note.id);
    const frame = this.node.getBoundingClientRect();
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(box.left - frame.left, 0), Math.max(frame.width - this.note.offsetWidth, 0));
    this.note.style.left = `${left}px`;
    this.note.style.top = `${box.bottom - frame.top + 4}px`;
  }

  hide() {
    this.text.querySelector(".looked")?.classList.remove("looked");
    this.note.hidden = true;
  }
}

TokenText.made = 0;

function noteOf(reading, token, open) {
  const facts = factsOf(reading, token);
  const by = token.drafter < 0 ? "the target" : token.name;
  const rows = [["from", token.drafter < 0 ? by : `${by}, depth ${token.depth}`]];
  if (facts) {
    rows.push(["target's probability", percent(facts.probability)]);
    if (facts.guess !== null) rows.push(["drafter's guess", percent(facts.guess)]);
    rows.push(["step", `${facts.number + 1}, after ${clock(facts.step.ended_s)}`]);
  }
  const rejected = facts?.rejected ?? [];
  return [
    el("strong", {}, visible(token.text)),
    el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    rejected.length ? el("p", { class: "small-head" }, "rejected here") : null,
    rejected.length ? el("ul", {}, rejected.slice(0, SHOWN).map((one) => el("li", {},
      el("s", {}, shorten(visible(one.text), 18)), ` ${one.drafter}: guessed ${percent(one.guess)}, `,
      `target ${percent(one.probability)}`))) : null,
    rejected.length > SHOWN ? el("p", { class: "faint" }, `and ${rejected.length - SHOWN} more`) : null,
    open ? el("button", { type: "button", onclick: open }, "Show the step") : null,
  ].filter(Boolean);
}
