// The keys that do something, as a list that every visitor can call up, and the switch that turns the single letters off
// for those who speak to their computer or rest a hand on the keyboard.

const KEYS = [
  ["Live", [["S", "start, stop"], ["Space", "look now"], ["F", "full screen"], ["M", "mirror"], ["R", "read aloud"],
    ["C", "copy the words"], ["N", "numbers"]]],
  ["Picture", [["Enter", "ask"], ["Shift Enter", "a new line"], ["Esc", "stop the answer"], ["Ctrl V", "paste a picture"]]],
  ["Everywhere", [["← →", "along the tabs"], ["Esc", "leave the full screen"], ["?", "this list"]]],
];

const STORED = "beholder.keys";
let off = read();

/** Whether letters typed outside of fields do something. */
export const lettersWork = () => !off;

/** Whether a key press is a letter for the page: not for a field or a dialog, nor with a modifier. */
export const isForPage = (event) =>
  !(event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog"));

/** Shows the list. */
export function showShortcuts() {
  const dialog = document.createElement("dialog");
  dialog.className = "keys-dialog";
  dialog.setAttribute("aria-labelledby", "keys-title");
  dialog.innerHTML = `
    <h2 id="keys-title">Keys</h2>
    <div class="keys-lists">${KEYS.map(section).join("")}</div>
    <label class="switch"><input type="checkbox" name="keys"><span>Single letters work</span></label>
    <form method="dialog"><button class="button">Close</button></form>`;
  const box = dialog.querySelector("input");
  box.checked = lettersWork();
  box.addEventListener("change", () => keep(!box.checked));
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close()); // beside it
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

const section = ([title, keys]) => `
  <section><h3>${title}</h3><dl>${keys.map(([key, what]) => `<div><dt>${signs(key)}</dt><dd>${what}</dd></div>`).join("")}</dl></section>`;
const signs = (key) => key.split(" ").map((each) => `<kbd>${each}</kbd>`).join(" ");

document.addEventListener("keydown", (event) => {
  if (event.key !== "?" || !lettersWork() || !isForPage(event) || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  showShortcuts();
});

// Nothing is stored by those who leave the switch as it is.
function keep(value) {
  off = value;
  try {
    if (off) localStorage.setItem(STORED, "off");
    else localStorage.removeItem(STORED);
  } catch {
    // storage may be forbidden: it holds until the page is left
  }
}

function read() {
  try {
    return localStorage.getItem(STORED) === "off";
  } catch {
    return false;
  }
}
