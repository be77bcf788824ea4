// Where the focus goes when what had it goes away: a button that was hidden, removed or disabled because it was pressed
// must not send people who use the keyboard back to the head of the page.

/** Whether an element can have the focus now. */
const usable = (element) =>
  element?.isConnected && !element.disabled && element.checkVisibility({ visibilityProperty: true });

/**
 * Passes the focus on, within an element, from whatever goes away while it has it.
 * @param root  the element
 * @param heirs selectors within it; the first that can have the focus gets it
 * @returns a function that stops
 */
export function passFocusOn(root, heirs) {
  let had = null; // what has the focus, or had it when it went away
  let frame = 0;

  const pass = () => {
    frame = 0;
    const { activeElement } = document;
    if (!had || usable(had) || (activeElement !== document.body && activeElement !== had)) return;
    had = null;
    const all = heirs.flatMap((selector) => [...root.querySelectorAll(selector)]);
    all.find(usable)?.focus({ preventScroll: true });
  };
  const changes = new MutationObserver(() => {
    if (had) frame ||= requestAnimationFrame(pass); // before the browser itself lets go of what is hidden
  });
  const onIn = ({ target }) => (had = target);
  // Somebody pressed beside everything; but what was removed is told of in the same way.
  const onOut = ({ target, relatedTarget }) =>
    queueMicrotask(() => {
      if (had === target && (relatedTarget || usable(target))) had = null;
    });

  root.addEventListener("focusin", onIn);
  root.addEventListener("focusout", onOut);
  changes.observe(root, { subtree: true, childList: true, attributes: true });
  return () => {
    root.removeEventListener("focusin", onIn);
    root.removeEventListener("focusout", onOut);
    changes.disconnect();
    cancelAnimationFrame(frame);
  };
}
