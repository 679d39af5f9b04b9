// The chat: turns of a conversation, and how the next answer is to be made.
import { el, replace } from "./dom.js";
import { Answer } from "./answer.js";
import { getJson, useKey } from "./server.js";

export class ChatView {
  constructor(opened, read) {
    this.opened = opened;
    this.read = read;
    this.messages = [];
    this.turns = el("div", { class: "turns", "aria-live": "off" });
    this.box = el("textarea", { rows: 2, "aria-label": "Message", placeholder: "Ask something",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          this.send();
        }
      } });
    this.button = el("button", { type: "submit", class: "main" }, "Send");
    this.beside = el("input", { type: "checkbox" });
    this.method = el("select", { "aria-label": "Method" }, el("option", { value: "" }, "default method"));
    this.temperature = number("Temperature", 0, { min: 0, max: 5, step: 0.1 });
    this.length = number("Most tokens", 256, { min: 1, max: 100000, step: 1 });
    this.seed = number("Seed", "", { min: 0, step: 1, placeholder: "any" });
    this.key = el("input", { type: "password", "aria-label": "API key", placeholder: "none", autocomplete: "off",
      onchange: () => {
        useKey(this.key.value);
        this.facts();
      } });
    this.form = el("form", { class: "composer", onsubmit: (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    } },
    el("div", { class: "composer-line" }, this.box, this.button),
    el("div", { class: "controls" },
      el("label", { class: "switch" }, this.beside, "plain decoding beside it"),
      el("button", { type: "button", onclick: () => this.clear() }, "New chat"),
      el("details", {}, el("summary", {}, "Settings"), el("div", { class: "settings" }, this.method,
        labelled("temperature", this.temperature), labelled("most tokens", this.length), labelled("seed", this.seed),
        labelled("API key", this.key)))));
    this.node = el("section", { class: "view text-view chat" }, this.turns, this.form);
    this.facts();
  }

  async facts() {
    try {
      const { outrider } = await getJson("/props");
      replace(this.method, el("option", { value: "" }, `${outrider.method} (default)`),
        outrider.methods.filter((name) => name !== outrider.method).map((name) => el("option", { value: name }, name)));
    } catch (error) {
      if (error.status === 401) this.form.querySelector("details").open = true;
    }
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    replace(this.turns);
    this.box.focus();
  }

  async send() {
    const text = this.box.value.trim();
    if (!text || this.running) return;
    const answer = new Answer(this.opened, this.read);
    this.turns.append(el("div", { class: "bubble user" }, text), answer.node);
    this.box.value = "";
    this.running = new AbortController();
    replace(this.button, "Stop");
    const messages = [...this.messages, { role: "user", content: text }];
    this.form.scrollIntoView({ block: "nearest" });
    try {
      await answer.ask(this.request(messages), this.beside.checked, this.running.signal);
      this.messages = [...messages, { role: "assistant", content: answer.fast.content }];
    } catch (error) {
      this.box.value = text; // what was written is not lost
      if (error.status === 401) this.form.querySelector("details").open = true;
    } finally {
      this.running = null;
      replace(this.button, "Send");
      this.form.scrollIntoView({ block: "nearest" });
    }
  }

  // Both runs have one seed, so that they say the same where texts are sampled, too.
  request(messages) {
    const seed = this.seed.value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(this.seed.value);
    const body = { messages, temperature: Number(this.temperature.value), max_tokens: Number(this.length.value), seed };
    return this.method.value ? { ...body, method: this.method.value } : body;
  }
}

function number(label, value, limits) {
  return el("input", { type: "number", "aria-label": label, value, ...limits });
}

function labelled(name, input) {
  return el("label", {}, el("span", { class: "faint" }, name), input);
}
