// Copying text, also where browsers give pages no clipboard: on plain http from another machine.

/** Copies; gives whether that went well. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const [area, focused] = [document.createElement("textarea"), document.activeElement];
    area.value = text;
    area.style.position = "fixed"; // the page does not scroll to it
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus({ preventScroll: true });
    return copied;
  }
}
