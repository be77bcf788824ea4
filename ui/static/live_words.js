// The words of a live session while they grow: beside the picture and over it, with the newest in sight.

import { continues, settled } from "./graphemes.js";
import { readable } from "./readable.js";

/** Shows the same words in several places. */
export class LiveWords {
  #places;
  #painted = "";
  #frame = 0; // of the animation that will put words there
  text = ""; // as it is shown, or will be in a moment

  /** @param places elements  @param sized elements whose size decides where a long text is cut */
  constructor(places, sized) {
    this.#places = [...places];
    const sizes = new ResizeObserver(() => this.#toTheEnd());
    for (const each of sized) sizes.observe(each);
  }

  /** Whether more than a sentence or two is to be expected. */
  set long(isLong) {
    for (const place of this.#places) place.dataset.long = isLong;
  }

  /** Nothing is shown: what was said was about something else. */
  clear() {
    this.text = this.#painted = "";
    for (const place of this.#places) place.textContent = "";
  }

  /** An answer so far. The same words again are not typed again: a still scene stays still on the page. */
  grow(text) {
    const words = readable(settled(text));
    if (!this.text.startsWith(words)) this.show(words);
  }

  /** Words as they are. */
  show(words) {
    this.text = words;
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.#frame = 0;
    const [before, now] = [this.#painted, this.text];
    if (now === before) return;
    const grows = before !== "" && continues(now, before);
    for (const place of this.#places) {
      if (!grows) place.textContent = "";
      const added = document.createElement("span"); // new words fade in
      added.textContent = grows ? now.slice(before.length) : now;
      place.append(added);
    }
    this.#toTheEnd();
    this.#painted = now;
  }

  #toTheEnd() {
    for (const place of this.#places) place.scrollTop = place.scrollHeight;
  }
}
