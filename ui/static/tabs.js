// The row of tabs is Gradio's. Here each tab gets an address (`…/ui/#engine`), which can be kept, sent and gone back to,
// and the arrow keys move along the row. Not a module, since those come late; a tab that was pressed even earlier stays.
(() => {
  const AGAIN_MS = 100;
  const TABS = '[role="tablist"] [role="tab"]';

  const tabs = () => [...document.querySelectorAll(TABS)];
  const nameOf = (tab) => tab.textContent.trim().toLowerCase();
  const inAddress = () => location.hash.slice(1);
  const isSelected = (tab) => tab.ariaSelected === "true";

  let wanted = inAddress(); // "" is the first
  let timer = 0;

  // Gradio takes no notice of a press while it is still at its beginning: then once more.
  function follow() {
    clearTimeout(timer);
    timer = 0;
    const all = tabs();
    const tab = all.find((each) => nameOf(each) === wanted) ?? all[0];
    if (!tab || isSelected(tab)) return;
    timer = setTimeout(follow, AGAIN_MS);
    tab.click();
  }

  // A button that was drawn anew between press and release gets no click; its row does.
  function pressed({ target, clientX, clientY }) {
    if (!target.closest?.(".tab-wrapper")) return null;
    return target.closest(TABS) ?? document.elementFromPoint(clientX, clientY)?.closest(TABS);
  }

  function onClick(event) {
    const tab = pressed(event);
    if (!tab) return;
    const name = tab === tabs()[0] ? "" : nameOf(tab);
    if (name === wanted) return; // brought here by its address
    wanted = name;
    history.pushState(null, "", name ? `#${name}` : location.pathname + location.search);
    clearTimeout(timer);
    timer = setTimeout(follow, AGAIN_MS); // unless Gradio has done it by then
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

  // A press that is not taken yet is tried again in its time: one at every change of the row could go round and round.
  const row = new MutationObserver(() => timer || follow());
  const page = new MutationObserver(() => {
    const found = document.querySelector(TABS)?.closest(".tab-wrapper");
    if (!found) return;
    page.disconnect();
    row.observe(found, { subtree: true, childList: true, attributes: true, attributeFilter: ["aria-selected"] });
    const [first, ...others] = tabs();
    const early = others.find(isSelected);
    if (early && !wanted) onClick({ target: early });
    else if (first) follow();
  });
  page.observe(document.documentElement, { subtree: true, childList: true });
})();
