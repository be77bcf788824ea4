// One question and its answer, as the tab Picture shows them.

import { withAdvice } from "./advice.js";
import { copy } from "./clipboard.js";
import { settled } from "./graphemes.js";

const NEXT = { again: "Ask again", other: "Ask something else, or begin anew" }; // what a visitor can do

/** `element` is a list item; `update` follows the turn. */
export class TurnView {
  #turn;
  #parts = {};
  #numberOf;

  /**
   * @param turn     of Conversation
   * @param numberOf a picture or clip → its number among all
   * @param again    called when the visitor wants another answer
   */
  constructor(turn, numberOf, again) {
    this.#turn = turn;
    this.#numberOf = numberOf;
    this.element = document.createElement("li");
    this.element.className = "turn";
    this.element.innerHTML = `
      <p class="turn-question" dir="auto"><span></span> <span class="turn-which" hidden></span></p>
      <p class="turn-answer" dir="auto"></p>
      <p class="notice bad turn-error" hidden></p>
      <div class="turn-foot">
        <button type="button" class="button quiet turn-copy" hidden>Copy</button>
        <button type="button" class="button quiet turn-again" hidden></button>
        <p class="turn-facts"></p>
      </div>`;
    const part = (name) => this.element.querySelector(`.turn-${name}`);
    for (const name of ["question", "which", "answer", "error", "copy", "again", "facts"]) this.#parts[name] = part(name);
    this.#parts.again.addEventListener("click", again);
    this.#parts.copy.addEventListener("click", () => this.#copy());
  }

  /** Shows the turn as it is now; `isLast`: it may be answered again; `several`: there is more than one picture. */
  update(isLast, several) {
    const { question, answer, state, error, facts, media } = this.#turn;
    this.element.dataset.state = state;
    this.#parts.question.firstElementChild.textContent = question;
    this.#parts.which.hidden = !several || !media.length;
    this.#parts.which.textContent = `with ${media.map(this.#numberOf).join(", ")}`;
    this.#parts.answer.textContent = state === "answering" ? settled(answer) : answer;
    this.#parts.error.hidden = !error;
    if (error) this.#parts.error.textContent = withAdvice(error, NEXT);
    this.#parts.copy.hidden = !answer || state === "answering";
    this.#parts.again.hidden = !isLast;
    this.#parts.again.textContent = state === "failed" || !answer ? "Ask again" : "Another answer";
    this.#parts.facts.textContent = state === "stopped" ? "Stopped." : facts ? inWords(facts) : "";
  }

  async #copy() {
    this.#parts.copy.textContent = (await copy(this.#turn.answer)) ? "Copied" : "Not copied";
    setTimeout(() => (this.#parts.copy.textContent = "Copy"), 1500);
  }
}

function inWords({ ttftMs, tokensPerS, promptTokens, cachedTokens }) {
  const said = [];
  if (ttftMs !== null) said.push(`first word after ${Math.round(ttftMs).toLocaleString("en")} ms`);
  if (tokensPerS) said.push(`${Math.round(tokensPerS)} tokens/s`);
  said.push(`${cachedTokens} of ${promptTokens} tokens cached`);
  return said.join(" · ");
}
