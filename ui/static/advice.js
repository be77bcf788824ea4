// What went wrong, in the server's words, and what a visitor can do next.

import { sentence } from "./sentences.js";

const SAYS_SO = /\b(again|go(es)? on)\b/i; // what to do stands there already

/**
 * The words for an ApiError.
 * @param again what helps when it may go well a little later, as "Ask again"
 * @param other what helps when the same would be refused again, as "Ask something else"
 */
export function withAdvice(error, { again, other }) {
  const words = sentence(error.message);
  if (error.isRefusal) return `${words} ${other}.`;
  const { retryAfterS } = error;
  if (retryAfterS) return `${words} ${again} in ${retryAfterS === 1 ? "a second" : `${retryAfterS} seconds`}.`;
  return SAYS_SO.test(words) ? words : `${words} ${again}.`;
}
