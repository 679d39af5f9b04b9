// The page of one generation, from the document that lies in the same file.
import { readDocument } from "./reading.js";
import { Shell } from "./shell.js";
import { StepsView } from "./steps.js";
import { TextView } from "./text.js";

const reading = readDocument(JSON.parse(document.getElementById("document").textContent));
const steps = new StepsView(reading);
const openStep = (number) => {
  shell.open("steps");
  steps.show(number);
  steps.range.focus();
};
const views = { text: new TextView(reading, openStep), steps };
const about = [reading.doc.model, reading.doc.method].filter(Boolean).join(" · ");
const shell = new Shell(document.getElementById("page"), about, [["text", "Text"], ["steps", "Steps"]],
  (name) => views[name].node);
shell.open(location.hash === "#steps" ? "steps" : "text");
