// Which key does what on the tab Live: single letters, and the space bar where it presses nothing else.

import { camerasAllowed } from "./live_source.js";
import { lettersWork } from "./shortcuts.js";

const LETTERS = { f: "wall", m: "mirror", r: "aloud", c: "copy", n: "numbers" };

/** What a key press that is for the page asks for, "" for nothing. @param running whether something is looked at */
export function actionOf({ key, target }, running) {
  if (!lettersWork()) return "";
  if (key === " ") return running && !target.closest?.("button, a, summary, [role=tab]") ? "snap" : ""; // it presses those
  if (key.toLowerCase() !== "s") return LETTERS[key.toLowerCase()] ?? "";
  if (running) return "stop";
  return camerasAllowed() ? "camera" : "";
}
