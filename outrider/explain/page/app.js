// The served page: a chat, the steps of its last answer, and the fleet.
import { el } from "./dom.js";
import { ChatView } from "./chat.js";
import { FleetView } from "./fleet.js";
import { Shell } from "./shell.js";
import { StepsView } from "./steps.js";

let steps = null;
let last = null;
const opened = (number, reading) => {
  if (steps?.reading !== reading) steps = new StepsView(reading);
  last = reading;
  location.hash = "steps";
  shell.open("steps");
  steps.show(number);
  steps.range.focus();
};
const chat = new ChatView(opened, (reading) => (last = reading));
const fleet = new FleetView();

function stepsNode() {
  if (!last) {
    return el("section", { class: "view" }, el("p", {}, "Ask something first: the steps of the last answer are shown here."));
  }
  if (steps?.reading !== last) steps = new StepsView(last);
  return steps.node;
}

const views = {
  text: () => chat.node,
  steps: stepsNode,
  fleet: () => {
    queueMicrotask(() => fleet.open());
    return fleet.node;
  },
};
const shell = new Shell(document.getElementById("page"), location.host,
  [["text", "Text"], ["steps", "Steps"], ["fleet", "Fleet"]], (name) => {
    history.replaceState(null, "", `#${name}`);
    return views[name]();
  });
const wanted = location.hash.slice(1);
shell.open(views[wanted] ? wanted : "text");
