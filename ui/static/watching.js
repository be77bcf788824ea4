// Who on this page looks at something of the visitor's right now. The head of the page shows it whichever tab is open,
// and so does the browser's own tab.

const looking = new Map();
const TITLE = "Beholder";

/** Tells that an element of the page looks (`label`, such as "Camera on") or looks no more (""). */
export function watching(element, label) {
  if (label) looking.set(element, label);
  else looking.delete(element);
  const labels = [...new Set(looking.values())].join(", ");
  document.title = labels ? `● ${labels} – ${TITLE}` : TITLE;
  document.dispatchEvent(new CustomEvent("beholder:watching", { detail: labels }));
}
