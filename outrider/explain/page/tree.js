// The tree of one step: what was proposed, how far the target went along, and the token that it said itself.
import { percent, shorten, svg, visible } from "./dom.js";
import { nameOf } from "./reading.js";

const WIDTH = 132;
const HEIGHT = 46;
const GAP_X = 30;
const GAP_Y = 10;
const LETTERS = 13;

// Leaves one below the other, a parent in the middle of its children.
function places(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const rows = new Array(parents.length).fill(0);
  let next = 0;
  const visit = (node) => {
    children[node].forEach(visit);
    const below = children[node];
    rows[node] = below.length ? (rows[below[0]] + rows[below[below.length - 1]]) / 2 : next++;
  };
  visit(0);
  return { rows, leaves: next };
}

export function treeOf(reading, step) {
  const { tree } = step;
  const accepted = new Set(step.path.slice(0, step.emitted.length));
  const last = step.path.slice(0, step.emitted.length - 1).at(-1) ?? 0;
  const bonus = step.emitted.length > step.path.length; // the target's token after the path
  const parents = bonus ? [...tree.parents, last] : tree.parents;
  const depths = bonus ? [...tree.depths, tree.depths[last] + 1] : tree.depths;
  const { rows, leaves } = places(parents);
  const deepest = Math.max(...depths);
  const width = (deepest + 1) * (WIDTH + GAP_X) - GAP_X + 4;
  const height = Math.max(leaves, 1) * (HEIGHT + GAP_Y) - GAP_Y + 4;
  const x = (node) => 2 + depths[node] * (WIDTH + GAP_X);
  const y = (node) => 2 + rows[node] * (HEIGHT + GAP_Y);
  const edges = [];
  const boxes = [];
  parents.forEach((parent, node) => {
    const said = bonus && node === parents.length - 1;
    const state = node === 0 ? "pending" : said ? "target" : accepted.has(node) ? "accepted" :
      tree.probability[node] === null ? "unreached" : "rejected";
    if (parent >= 0) {
      const [x1, y1, x2, y2] = [x(parent) + WIDTH, y(parent) + HEIGHT / 2, x(node), y(node) + HEIGHT / 2];
      const middle = (x1 + x2) / 2;
      edges.push(svg("path", { class: `edge ${state}`, d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` }));
    }
    boxes.push(box(reading, step, node, state, said, x(node), y(node)));
  });
  const label = `Tree of ${parents.length - 1 - Number(bonus)} candidates, ${accepted.size} accepted`;
  return svg("svg", { class: "tree", role: "img", "aria-label": label, width, height,
    viewBox: `0 0 ${width} ${height}` }, edges, boxes);
}

const SIGNS = { pending: "●", target: "★", accepted: "✓", rejected: "✗", unreached: "·" };

function box(reading, step, node, state, said, left, top) {
  const { tree } = step;
  const token = said ? step.emitted.at(-1) : tree.tokens[node];
  const text = visible(reading.label(token));
  const guess = tree.guess?.[node] ?? null;
  const facts = node === 0 ? "text already" : said ? `target ${percent(step.probability.at(-1))}` :
    [guess === null ? null : `q ${percent(guess)}`,
      tree.probability[node] === null ? null : `p ${percent(tree.probability[node])}`].filter(Boolean).join(" · ");
  const drafter = said || node === 0 ? -1 : tree.drafters[node];
  const title = said ? `${text}: the target's own token` : node === 0 ? `${text}: the last token of the text` :
    `${text}: ${nameOf(reading, drafter)}, depth ${tree.depths[node]}, ${state}; guess ${percent(guess)}, ` +
    `target ${percent(tree.probability[node])}`;
  return svg("g", { class: `node ${state}${drafter >= 0 ? ` n${drafter % 8}` : ""}`,
    transform: `translate(${left} ${top})`, data: { node: said ? "target" : node } },
  svg("title", {}, title),
  svg("rect", { width: WIDTH, height: HEIGHT, rx: said ? HEIGHT / 2 : 6 }),
  svg("text", { x: said ? 18 : 10, y: 19, class: "word" }, shorten(text, LETTERS)),
  svg("text", { x: WIDTH - (said ? 18 : 9), y: 19, class: "sign" }, SIGNS[state]),
  svg("text", { x: said ? 18 : 10, y: 36, class: "facts" }, facts));
}
