// One answer of a chat: its tokens as they come, then with all that its trace knows, and plain decoding beside it.
import { clock, count, el, replace } from "./dom.js";
import { legendOf, markOf } from "./marks.js";
import { readDocument } from "./reading.js";
import { getJson, streamed } from "./server.js";
import { figuresOf } from "./text.js";
import { TokenText } from "./tokens.js";

// One run of the request, with a clock that starts at the first token: decode time, as in every figure of speed.
class LiveRun {
  constructor(name, onOpen) {
    this.ids = [];
    this.content = "";
    this.text = new TokenText(onOpen);
    this.clock = el("output", { class: "clock" }, "…");
    this.node = el("div", { class: "bubble answer" }, el("div", { class: "column-head" }, el("strong", {}, name),
      this.clock), this.text.node);
    this.names = [];
    this.done = false;
  }

  async run(body, signal, grown) {
    let begun = null;
    const tick = setInterval(() => begun !== null && this.tell((performance.now() - begun) / 1e3), 50);
    try {
      for await (const chunk of streamed("/v1/chat/completions", body, signal)) {
        this.id = chunk.id ?? this.id;
        this.timings = chunk.timings ?? this.timings;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        if (choice.token_ids?.length && begun === null) begun = performance.now();
        this.add(choice);
        grown?.();
      }
      this.done = true;
    } finally {
      clearInterval(tick);
      if (this.timings) this.tell(this.timings.predicted_ms / 1e3);
      else if (begun !== null) this.tell((performance.now() - begun) / 1e3);
    }
  }

  tell(seconds) {
    replace(this.clock, `${clock(seconds)} · ${count(this.ids.length, "token")}`);
  }

  // A chunk may hold several tokens; until the trace is there its text has the mark of the first of them.
  add(choice) {
    this.ids.push(...(choice.token_ids ?? []));
    const text = choice.delta?.content ?? "";
    this.content += text;
    if (!text) return;
    const { drafter = "", depth = 0 } = choice.outrider?.origins?.[0] ?? {};
    if (drafter && !this.names.includes(drafter)) this.names.push(drafter);
    this.text.text.append(el("span", { class: markOf(drafter ? this.names.indexOf(drafter) : -1, depth) }, text));
  }
}

export class Answer {
  // `opened` is told of a step that somebody wants to see, `read` of the trace once it is there.
  constructor(opened, read) {
    this.read = read;
    this.fast = new LiveRun("…", opened);
    this.columns = el("div", { class: "columns" }, this.fast.node);
    this.legend = el("div", {});
    this.below = el("div", {});
    this.verdict = el("p", { class: "verdict", role: "status" });
    this.trouble = el("p", { class: "trouble", role: "alert" });
    this.node = el("article", { "aria-label": "Answer" }, this.legend, this.verdict, this.columns, this.below,
      this.trouble);
  }

  async ask(body, beside, signal) {
    const full = { ...body, return_token_ids: true, outrider: { origins: true, trace: true } };
    try {
      await this.fast.run(full, signal);
      replace(this.fast.node.querySelector("strong"), this.fast.timings?.method || body.method || "default");
      await this.explain();
      if (beside) await this.runPlain(full, signal);
    } catch (error) {
      const gone = error.name === "AbortError";
      replace(this.trouble, gone ? "stopped" : error.message);
      if (!gone) throw error;
      return false;
    }
    return true;
  }

  async explain() {
    let doc;
    try {
      doc = await getJson(`/v1/outrider/trace/${encodeURIComponent(this.fast.id)}`);
    } catch (error) { // the answer is there all the same
      replace(this.below, el("p", { class: "faint" }, `Its steps cannot be shown: ${error.message}`));
      return;
    }
    this.reading = readDocument(doc);
    this.fast.text.show(this.reading);
    replace(this.legend, legendOf(this.reading));
    replace(this.below, figuresOf(doc.stats));
    this.read(this.reading);
  }

  // Behind the first run, not beside it: each has the machine to itself, and its clock means something.
  async runPlain(full, signal) {
    this.plain = new LiveRun("plain", null);
    this.columns.append(this.plain.node);
    this.node.classList.add("both");
    const body = { ...full, method: "plain", outrider: { origins: true } };
    await this.plain.run(body, signal, () => this.compare());
    this.compare();
  }

  compare() {
    const [fast, plain] = [this.fast.ids, this.plain.ids];
    let same = 0;
    while (same < plain.length && plain[same] === fast[same]) same += 1;
    const differ = same < plain.length && same < fast.length;
    const ended = this.plain.done && same === fast.length && same === plain.length;
    replace(this.verdict, ended ? `✓ identical: all ${count(same, "token")}` :
      differ ? `identical for the first ${count(same, "token")}, then they differ` :
        `identical so far: ${count(same, "token")}`);
  }
}
