// Sentences: what is refused becomes one, and text that grows is read out sentence by sentence, never letter by letter.

const END = /[.!?…]["'”’)\]]*\s/g;

/** What the server refused, as a sentence of its own. */
export function sentence(words) {
  const text = words.trim();
  return text && text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");
}

/** Puts finished sentences of a growing text into a live region. */
export class Reader {
  #region;
  #said = 0;

  /** @param region an element with aria-live="polite" */
  constructor(region) {
    this.#region = region;
  }

  /** A new text begins. */
  begin() {
    this.#said = 0;
    this.#region.textContent = "";
  }

  /** The text so far; `finished` when nothing follows. */
  hear(text, finished = false) {
    const ends = [...text.matchAll(END)].map((found) => found.index + found[0].length);
    const end = finished ? text.length : (ends.at(-1) ?? 0);
    if (end <= this.#said) return;
    this.#region.append(text.slice(this.#said, end));
    this.#said = end;
  }
}
