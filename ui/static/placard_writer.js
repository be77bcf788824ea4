// Has the model write a wall label. Asks for JSON (preset museum_placard), and believes it only as far as the model
// itself does: a field whose words it hardly thought likely is left out, and a model to which the whole shape is foreign
// is asked in words instead (preset placard_in_words).

import { call, events } from "./api.js";
import { settled } from "./graphemes.js";

const FOREIGN = 0.25; // mean probability of the tokens below which the shape means nothing to the model
const ENOUGH_TOKENS = 12; // to tell that
const BELIEVED = 0.5; // the same of one field
const GUESSABLE = ["artist", "year", "medium"];
const UNKNOWN = ["artist unknown.", "unknown artist.", "the artist is unknown."];

let knowsShape = true; // of the model of this server, until it shows otherwise

/**
 * Writes the label of a picture.
 * @param url     data URL of the picture
 * @param onLabel called with the label so far
 * @param signal  AbortSignal
 * @returns the label
 */
export async function writeLabel(url, onLabel, signal) {
  if (knowsShape) {
    const label = await inJson(url, onLabel, signal);
    if (label) return label;
    knowsShape = false;
  }
  return inWords(url, onLabel, signal);
}

async function inJson(url, onLabel, signal) {
  const stop = new AbortController();
  const either = AbortSignal.any([signal, stop.signal]);
  const pieces = []; // {start, end, logprob}
  let text = "";
  for await (const { delta, logprobs } of ask("museum_placard", url, either, { logprobs: true })) {
    const start = text.length;
    text += delta.content ?? "";
    for (const { logprob } of logprobs?.content ?? []) pieces.push({ start, end: text.length, logprob });
    if (pieces.length < ENOUGH_TOKENS) continue;
    if (likelihood(pieces) < FOREIGN) {
      stop.abort();
      return null;
    }
    onLabel(growing(labelOf(text, pieces)));
  }
  if (likelihood(pieces) < FOREIGN) return null;
  return labelOf(text, pieces);
}

async function inWords(url, onLabel, signal) {
  let text = "";
  for await (const { delta } of ask("placard_in_words", url, signal)) {
    text += delta.content ?? "";
    onLabel(growing(labelOfWords(text)));
  }
  return labelOfWords(text);
}

// Without half of a sign at the end of what is being written.
function growing(label) {
  const name = label.text ? "text" : "title";
  return { ...label, [name]: settled(label[name]) };
}

async function* ask(preset, url, signal, options = {}) {
  const content = [{ type: "image_url", image_url: { url } }];
  const json = { preset, stream: true, messages: [{ role: "user", content }], ...options };
  const response = await call("/v1/chat/completions", { json, signal });
  for await (const event of events(response)) if (event.choices[0]) yield event.choices[0];
}

/** The geometric mean of the tokens' probabilities. */
function likelihood(pieces) {
  return pieces.length ? Math.exp(pieces.reduce((sum, { logprob }) => sum + logprob, 0) / pieces.length) : 0;
}

// The JSON so far: a flat object, whose last value may be unfinished.
function labelOf(text, pieces) {
  const label = { title: "", artist: null, year: null, medium: null, text: "" };
  for (const [, name, value] of text.matchAll(/"(title|text)"\s*:\s*"((?:[^"\\]|\\.)*)/g)) label[name] = unescaped(value);
  for (const found of text.matchAll(/"(artist|year|medium)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+(?=\s*[,}]))/g)) {
    const [whole, name, value] = found;
    const end = found.index + whole.length;
    const own = pieces.filter((piece) => piece.start < end && piece.end > end - value.length);
    if (GUESSABLE.includes(name) && likelihood(own) >= BELIEVED) label[name] = JSON.parse(value);
  }
  return label;
}

function unescaped(value) {
  try {
    return JSON.parse(`"${value.replace(/\\u?[\da-f]{0,3}$/i, "")}"`);
  } catch {
    return value;
  }
}

// "Fox. This picture shows a fox. Artist unknown.": the first sentence is the title; what is not known is not said.
function labelOfWords(text) {
  const [, title, rest] = /^\s*(.*?)(?:[.!]?\n|[.!]\s|[.!]?$)([^]*)$/.exec(text.trim()) ?? ["", text, ""];
  return { title: title.replace(/^["“](.*)["”]$/, "$1"), artist: null, year: null, medium: null, text: known(rest.trim()) };
}

// Also while the sentence is still being written, so that it never shows.
function known(text) {
  const last = /(?:^|[.!?]\s+)([^.!?]*\.?)$/.exec(text)?.[1] ?? "";
  const says = last.toLowerCase();
  return says && UNKNOWN.some((sentence) => sentence.startsWith(says)) ? text.slice(0, -last.length).trim() : text;
}
