// The numbers of a live session: how old the picture was, how fast the words come, what became of the frames.

const FIGURES = [
  ["age", "Frame age", "From taking the picture to the first word about it, as seen in this browser"],
  ["ttft", "First word", "From the start of the answer to its first word, on the server"],
  ["speed", "Speed", "How fast the words come, in tokens a second; of words that came all at once, over the whole answer"],
  ["received", "Frames in", "Pictures that the server has taken"],
  ["captioned", "Captioned", "Pictures that were described"],
  ["dropped", "Dropped", "Pictures that were not looked at: a newer one came, or nothing had changed"],
  ["vision", "Vision tokens", "Tokens that the picture became"],
  ["cached", "Cached", "Tokens of the prompt that did not have to be computed again"],
];

/** Shows them; `figuresOf` reads them from a finished response. */
export class LiveFigures {
  #cells = {};

  constructor(list) {
    list.innerHTML = FIGURES.map(
      ([id, name, title]) => `<div title="${title}"><dt>${name}</dt><dd data-figure="${id}">–</dd></div>`,
    ).join("");
    for (const cell of list.querySelectorAll("dd")) this.#cells[cell.dataset.figure] = cell;
  }

  /** The first word has come. */
  age(ms) {
    this.#set("age", milliseconds(ms));
  }

  /** A response is finished. */
  response({ ttftMs, tokensPerS, visionTokens, cachedTokens, inputTokens }) {
    this.#set("ttft", milliseconds(ttftMs));
    this.#set("speed", tokensPerS ? `${Math.round(tokensPerS)} tok/s` : "–");
    this.#set("vision", visionTokens);
    this.#set("cached", inputTokens ? `${cachedTokens} of ${inputTokens}` : "–");
  }

  /** `frames.stats` came; `skipped` are those that this browser did not send. */
  frames({ received, captioned, dropped }, skipped) {
    const lost = Object.values(dropped).reduce((sum, each) => sum + each, 0) + skipped;
    this.#set("received", received);
    this.#set("captioned", captioned);
    this.#set("dropped", lost);
    const why = Object.entries({ ...dropped, ...(skipped ? { "slow network": skipped } : {}) });
    this.#cells.dropped.title = why.map(([reason, count]) => `${reason.replace("_", " ")}: ${count}`).join(", ");
  }

  #set(id, text) {
    if (this.#cells[id].textContent !== String(text)) this.#cells[id].textContent = text;
  }
}

/** The figures of a `response.done`. */
export function figuresOf({ usage, timings }, ageMs) {
  return {
    ageMs: ageMs === null ? null : Math.round(ageMs),
    ttftMs: timings.ttft_ms === null ? null : Math.round(timings.ttft_ms),
    tokensPerS: tokensPerS(usage.output_tokens, timings),
    visionTokens: usage.image_tokens,
    cachedTokens: usage.cached_tokens,
    inputTokens: usage.input_tokens,
    outputTokens: usage.output_tokens,
  };
}

// Words that were all guessed rightly come at once: then over the time of the whole answer.
function tokensPerS(numTokens, { tpot_ms: tpotMs, total_ms: totalMs }) {
  const perS = tpotMs ? 1000 / tpotMs : totalMs && (1000 * numTokens) / totalMs;
  return perS ? Math.round(10 * perS) / 10 : null;
}

function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
