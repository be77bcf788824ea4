// A conversation about pictures and clips over `/v1/chat/completions`. Knows no page: tells what changes as events.

import { ApiError, call, events } from "./api.js";

const AGAIN = { temperature: 0.8 }; // a second try that said the same would be no use

/**
 * Events:
 *   change    {turn}                 while an answer grows and when it ends
 *   refused   {turn, medium, error}  the server cannot read one of the pictures or clips: it has left the conversation
 *   withdrawn {turn}                 with it the question, which was about nothing else
 *
 * A turn: {question, media, answer, state, error, facts}. States: asking, answering, done, stopped, failed.
 */
export class Conversation extends EventTarget {
  turns = [];
  #running = null;
  #sent = []; // of each message that was sent last, its pictures and clips

  /** The turn that is being answered, or null. */
  get running() {
    return this.#running?.turn ?? null;
  }

  /** Asks; resolves when the answer has ended, however. */
  async ask(question, media = []) {
    const turn = { question, media, answer: "", state: "asking", error: null, facts: null };
    this.turns.push(turn);
    await this.#answer(turn, {});
  }

  /** Answers the last turn again: differently if there is an answer, the same way if it failed or had no word yet. */
  async again() {
    const turn = this.turns.at(-1);
    if (!turn || this.running) return;
    const isAnswered = turn.state !== "failed" && turn.answer;
    const sampling = isAnswered ? { ...AGAIN, seed: crypto.getRandomValues(new Uint32Array(1))[0] } : {};
    Object.assign(turn, { answer: "", state: "asking", error: null, facts: null });
    await this.#answer(turn, sampling);
  }

  /** Ends the running answer; what was said stays. */
  stop() {
    this.#running?.cancel.abort();
  }

  async #answer(turn, sampling) {
    const running = (this.#running = { turn, cancel: new AbortController() });
    this.#tell(turn);
    try {
      do await this.#stream(turn, sampling, running.cancel.signal).catch((error) => this.#withdraw(turn, error));
      while (turn.state === "asking" && this.turns.includes(turn)); // asked again, without what cannot be read
    } catch (error) {
      if (error.name === "AbortError") turn.state = "stopped";
      else Object.assign(turn, { state: "failed", error });
    }
    if (this.#running === running) this.#running = null;
    if (this.turns.includes(turn)) this.#tell(turn);
    else this.#say("withdrawn", { turn });
  }

  // Takes out of the conversation what the server refuses; throws the error when it is about something else.
  #withdraw(turn, error) {
    const medium = this.#culprit(turn, error);
    if (!medium) throw error;
    const wasItsOwn = turn.media.includes(medium);
    Object.assign(turn, { answer: "", state: "asking" });
    for (const each of this.turns) each.media = each.media.filter((other) => other !== medium);
    if (wasItsOwn && !turn.media.length) this.turns = this.turns.filter((other) => other !== turn);
    this.#say("refused", { turn, medium, error });
  }

  #culprit(turn, error) {
    if (!(error instanceof ApiError && error.isRefusal)) return null;
    if (error.medium) return error.medium; // its upload failed
    const place = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(error.param ?? "");
    if (place) return this.#sent[place[1]]?.[place[2]] ?? null;
    return error.status === 413 && turn.media.length === 1 ? turn.media[0] : null;
  }

  async #stream(turn, sampling, signal) {
    const began = performance.now();
    let first = 0;
    let last = 0;
    const response = await this.#send(turn, sampling, signal);
    for await (const event of events(response)) {
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        last = performance.now();
        first ||= last;
        turn.answer += piece;
        turn.state = "answering";
        this.#tell(turn);
      }
      if (event.usage) turn.facts = facts(event.usage, began, first, last);
    }
    turn.state = "done";
    this.#noteCached(turn);
  }

  // Uploads may have been forgotten by a restarted server: then they are sent again, once.
  async #send(turn, sampling, signal) {
    const options = { stream: true, stream_options: { include_usage: true }, ...sampling };
    const sent = async () => {
      const messages = await unlessStopped(this.#messages(turn), signal);
      return call("/v1/chat/completions", { json: { ...options, messages }, signal });
    };
    try {
      return await sent();
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "image_not_found") throw error;
      for (const medium of this.#media()) medium.forget();
      return sent();
    }
  }

  // A question that got no answer is not asked again with the next: what was wrong with it would be wrong for ever. Its
  // pictures go along with the next one.
  async #messages(last) {
    const messages = [];
    this.#sent = [];
    let waiting = [];
    for (const turn of this.turns) {
      const media = [...waiting, ...turn.media];
      waiting = turn === last || turn.answer ? [] : media;
      if (turn !== last && !turn.answer) continue;
      const parts = await Promise.all(media.map(partOf));
      this.#sent.push(media);
      messages.push({ role: "user", content: [...parts, { type: "text", text: turn.question }] });
      if (turn === last) break;
      this.#sent.push([]);
      messages.push({ role: "assistant", content: turn.answer });
    }
    return messages;
  }

  #media() {
    return this.turns.flatMap((turn) => turn.media);
  }

  // The server tells of each picture and frame in order; a clip is as many of them as its tokens need.
  #noteCached(turn) {
    const items = [...(turn.facts?.media ?? [])];
    for (const medium of this.#media()) {
      if (!items.length) return;
      const mine = [items.shift()];
      while (medium.isClip && items.length && sum(mine, "num_tokens") < medium.tokens) mine.push(items.shift());
      medium.cached = { tokens: sum(mine, "cached_tokens"), of: sum(mine, "num_tokens") };
    }
  }

  #tell(turn) {
    this.#say("change", { turn });
  }

  #say(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

function facts(usage, began, first, last) {
  const seconds = (last - first) / 1e3;
  return {
    ttftMs: first ? first - began : null,
    tokensPerS: seconds > 0.005 ? (usage.completion_tokens - 1) / seconds : null,
    tokens: usage.completion_tokens,
    promptTokens: usage.prompt_tokens,
    cachedTokens: usage.prompt_tokens_details.cached_tokens,
    media: usage.prompt_tokens_details.media ?? [],
  };
}

// What goes wrong while one is uploaded says which it was.
const partOf = (medium) =>
  medium.part().catch((error) => {
    throw error instanceof ApiError ? Object.assign(error, { medium }) : error;
  });

// Uploads go on, and are there when it is asked again; but nobody waits for them.
function unlessStopped(promise, signal) {
  return new Promise((resolve, reject) => {
    const stopped = () => reject(signal.reason);
    if (signal.aborted) stopped();
    signal.addEventListener("abort", stopped);
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", stopped));
  });
}

const sum = (items, name) => items.reduce((total, item) => total + item[name], 0);
