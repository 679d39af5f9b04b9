// A document as the views read it: tokens with all that is known of each, and steps.

export function readDocument(doc) {
  const trace = doc.trace ?? { drafters: [], steps: [], curves: [], left_out: 0 };
  const names = [...new Set([...trace.drafters, ...doc.origins.map(([name]) => name).filter(Boolean)])];
  const tokens = doc.pieces.map((piece, i) => {
    const [name, depth] = doc.origins[i] ?? ["", 0];
    return { at: i, id: doc.token_ids[i], text: piece, drafter: name ? names.indexOf(name) : -1, name, depth,
      step: -1, place: -1, ended: null };
  });
  trace.steps.forEach((step, number) => {
    step.emitted.forEach((_, place) => {
      const token = tokens[step.first + place];
      if (token) Object.assign(token, { step: number, place, ended: step.ended_s });
    });
  });
  const label = (id) => (doc.texts[id] === "" || doc.texts[id] === undefined ? `⟨${id}⟩` : doc.texts[id]);
  return { doc, trace, names, tokens, label, steps: trace.steps, curves: trace.curves };
}

// What the target and the drafters said of this place in the text.
export function factsOf(reading, token) {
  const step = reading.steps[token.step];
  if (!step) return null;
  const parent = token.place === 0 ? 0 : step.path[token.place - 1];
  const chosen = token.place < step.path.length ? step.path[token.place] : -1;
  const rejected = [];
  const { tree } = step;
  for (let node = 1; node < tree.tokens.length; node += 1) {
    if (tree.parents[node] !== parent || node === chosen) continue;
    rejected.push({ text: reading.label(tree.tokens[node]), drafter: nameOf(reading, tree.drafters[node]),
      guess: tree.guess?.[node] ?? null, probability: tree.probability[node] });
  }
  rejected.sort((a, b) => (b.probability ?? 0) - (a.probability ?? 0));
  return { step, number: token.step, probability: step.probability[token.place] ?? null,
    guess: chosen >= 0 ? tree.guess?.[chosen] ?? null : null, rejected };
}

export function nameOf(reading, drafter) {
  return drafter >= 0 ? reading.trace.drafters[drafter] : "a drafter";
}

// Tokens by who brought them: [name, number], the target first.
export function sharesOf(reading) {
  const shares = new Map([["", 0]]);
  for (const token of reading.tokens) shares.set(token.name, (shares.get(token.name) ?? 0) + 1);
  return [...shares];
}

// The curve that the cost model had at this step.
export function curveAt(reading, number) {
  let found = null;
  for (const curve of reading.curves) if (curve.first <= number) found = curve;
  return found;
}

const WHY = {
  plain: "This method does not draft: the target says one token a step.",
  failed: "The drafter raised an error earlier; the text goes on without it.",
  "no-room": "The text ends here at the latest: a candidate could not be used any more.",
  rests: "The controller rests: speculation was slower than plain decoding lately, or no longer paid.",
  "nothing-offered": "No drafter had a candidate for this place.",
  "none-paid": "There were candidates, but no row of them was expected to pay for itself.",
};

export function whySentence(step) {
  const { budget } = step;
  if (WHY[budget.reason]) return WHY[budget.reason];
  const all = `${budget.verified} of ${budget.offered} candidates that the drafters had were verified`;
  if (budget.reason === "cut") {
    const full = budget.verified >= budget.nodes;
    return `${all}: ${full ? "the budget was full." : "the next one was not worth its row in the pass."}`;
  }
  return budget.offered === 1 ? "The one candidate that the drafters had was verified." :
    `All ${budget.offered} candidates that the drafters had were verified.`;
}
