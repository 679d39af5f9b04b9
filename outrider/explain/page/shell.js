// The frame of a page: its name, its tabs, light or dark.
import { el } from "./dom.js";

export class Shell {
  // `tabs`: [name, title]; `show` is called with the name of the one that is wanted.
  constructor(root, about, tabs, show) {
    this.show = show;
    this.tabs = new Map(tabs.map(([name, title]) => [name, el("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "view", "aria-selected": "false", tabindex: "-1",
      onclick: () => this.open(name), onkeydown: (event) => this.key(event, name),
    }, title)]));
    this.view = el("main", { id: "view", role: "tabpanel" });
    root.replaceChildren(
      el("header", { class: "top" },
        el("h1", {}, "Outrider"), el("span", { class: "about" }, about),
        el("nav", { role: "tablist", "aria-label": "Views" }, ...this.tabs.values()),
        el("button", { type: "button", class: "theme", onclick: () => this.theme() }, "◐",
          el("span", { class: "hidden" }, "Light or dark"))),
      this.view);
  }

  open(name) {
    for (const [other, tab] of this.tabs) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.setAttribute("tabindex", other === name ? "0" : "-1");
    }
    this.view.setAttribute("aria-labelledby", `tab-${name}`);
    this.view.replaceChildren(this.show(name));
  }

  key(event, name) {
    const names = [...this.tabs.keys()];
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = names[(names.indexOf(name) + move + names.length) % names.length];
    this.open(next);
    this.tabs.get(next).focus();
    event.preventDefault();
    event.stopPropagation();
  }

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }
}
