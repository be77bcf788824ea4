// The row of tabs is Gradio's. Here each tab gets an address (`…/ui/#engine`), which can be kept, sent and gone back to,
// and the arrow keys move along the row.

const TABS = '[role="tablist"] [role="tab"]';

const tabs = () => [...document.querySelectorAll(TABS)];
const nameOf = (tab) => tab.textContent.trim().toLowerCase();
const inAddress = () => decodeURIComponent(location.hash.slice(1));
const isSelected = (tab) => tab.ariaSelected === "true";

let wanted = inAddress(); // "" is the first

function follow() {
  const all = tabs();
  const tab = all.find((each) => nameOf(each) === wanted) ?? all[0];
  if (tab && !isSelected(tab)) tab.click();
}

function onClick({ target }) {
  const tab = target.closest?.(TABS);
  if (!tab) return;
  const name = tab === tabs()[0] ? "" : nameOf(tab);
  if (name === wanted) return; // brought here by its address
  wanted = name;
  history.pushState(null, "", name ? `#${name}` : location.pathname + location.search);
}

function onKey(event) {
  const tab = event.target.closest?.(TABS);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!tab || !step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const all = tabs();
  const next = all[(all.indexOf(tab) + step + all.length) % all.length];
  next.click();
  next.focus();
}

document.addEventListener("click", onClick, true);
document.addEventListener("keydown", onKey);
addEventListener("popstate", () => {
  wanted = inAddress();
  follow();
});

// Gradio draws the row when it is ready, and a tab that was pressed meanwhile is not forgotten.
const row = new MutationObserver(follow);
const page = new MutationObserver(() => {
  const found = document.querySelector(TABS)?.closest(".tab-wrapper");
  if (!found) return;
  page.disconnect();
  row.observe(found, { subtree: true, childList: true, attributes: true, attributeFilter: ["aria-selected"] });
  follow();
});
page.observe(document.body, { subtree: true, childList: true });
