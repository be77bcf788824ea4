// Words that are told for a moment, to everybody: "Copied".

const LEAST_MS = 2000;
const READING_MS = 80; // a sign

/** Tells them in an element with role="status". */
export class PassingWords {
  #place;
  #timer = 0;

  constructor(place) {
    this.#place = place;
  }

  /** Shows words for as long as it takes to read them. */
  say(words) {
    this.#place.textContent = words;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (this.#place.textContent = ""), Math.max(LEAST_MS, READING_MS * words.length));
  }
}
