// The small pictures and clips below the one that is shown, in the tab Picture.

/**
 * Draws them into a list.
 * @param media     all of them, in order
 * @param shown     the one that is shown large
 * @param removable those that can still be taken away
 * @param onShow, onRemove called with one of them
 * @param onAdd     called when the visitor wants to bring more
 */
export function drawStrip(list, { media, shown, removable, onShow, onRemove, onAdd }) {
  const items = media.map((medium, index) => {
    const name = `${medium.isClip ? "clip" : "picture"} ${index + 1}`;
    const item = document.createElement("li");
    item.append(button("picture-thumb", `Show ${name}`, () => onShow(medium)));
    item.firstChild.setAttribute("aria-pressed", String(medium === shown));
    const number = Object.assign(document.createElement("span"), { textContent: index + 1, ariaHidden: "true" });
    item.firstChild.append(small(medium), number);
    if (removable.includes(medium)) {
      item.append(button("picture-remove", `Take ${name} away`, () => onRemove(medium)));
      item.lastChild.textContent = "×";
    }
    return item;
  });
  const add = document.createElement("li");
  add.append(button("picture-add", "Add pictures or clips", onAdd));
  add.firstChild.textContent = "+";
  const focused = list.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  list.replaceChildren(...items, add);
  if (focused) withName(list, focused).focus({ preventScroll: true }); // it has been drawn anew, or is gone
}

function withName(list, name) {
  const buttons = [...list.querySelectorAll("button")];
  return buttons.find(({ ariaLabel }) => ariaLabel === name) ?? buttons.at(-1);
}

function small(medium) {
  const view = document.createElement(medium.isClip ? "video" : "img");
  Object.assign(view, { src: medium.url, alt: "", muted: true, preload: "metadata" });
  if (medium.isClip) view.tabIndex = -1;
  return view;
}

function button(className, name, onClick) {
  const made = Object.assign(document.createElement("button"), { type: "button", className });
  made.setAttribute("aria-label", name);
  made.addEventListener("click", onClick);
  return made;
}
