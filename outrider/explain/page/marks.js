// How an origin looks: a tint, and a line below that differs without colour, too. The target's tokens are bare.
import { el } from "./dom.js";
import { sharesOf } from "./reading.js";

const KINDS = 8; // drafters that look different; more begin again

export function markOf(drafter, depth) {
  return drafter < 0 ? "token target" : `token drafted o${drafter % KINDS} d${Math.min(depth, 4)}`;
}

export function legendOf(reading) {
  const total = Math.max(reading.tokens.length, 1);
  return el("ul", { class: "legend", "aria-label": "Who brought the tokens" },
    sharesOf(reading).map(([name, number]) => el("li", {},
      el("span", { class: markOf(reading.names.indexOf(name), 1) }, name || "target"),
      el("span", { class: "faint" }, ` ${number} · ${Math.round((100 * number) / total)}%`))));
}
