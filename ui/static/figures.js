// The figures of the page Engine: what each shows, and how it is worked out of `/metrics`.
//
// A figure: {title, lines: [{name, value(window, sample)}], most, write}. `value` gives a number, or null when there is
// none; `write` turns it into words. `window` is the last half minute, or null right after a start.

import { growth, mean, percentile, rate, total } from "./metrics.js";

const TTFT = "vllm:time_to_first_token_seconds";
const ITL = "vllm:inter_token_latency_seconds";

const gauge = (name, labels) => (window, sample) => total(sample.values, name, labels);
const inWindow = (work) => (window) => (window ? work(window) : null);
const share = (hits, queries) =>
  inWindow((window) => (growth(window, queries) ? (100 * growth(window, hits)) / growth(window, queries) : null));

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(1)));
const milliseconds = (value) => (value >= 10_000 ? `${number(value / 1e3)} s` : `${number(value)} ms`);
const percent = (value) => `${number(value)} %`;

export const FIGURES = [
  {
    title: "Requests",
    write: (value) => String(value),
    lines: [
      { name: "running", value: gauge("vllm:num_requests_running") },
      { name: "waiting", value: gauge("vllm:num_requests_waiting") },
    ],
  },
  {
    title: "Time to first token",
    write: milliseconds,
    lines: [
      { name: "median", value: inWindow((window) => times1000(percentile(window, TTFT, 0.5))) },
      { name: "95 %", value: inWindow((window) => times1000(percentile(window, TTFT, 0.95))) },
    ],
  },
  {
    title: "Time between tokens",
    write: milliseconds,
    lines: [
      { name: "median", value: inWindow((window) => times1000(percentile(window, ITL, 0.5))) },
      { name: "95 %", value: inWindow((window) => times1000(percentile(window, ITL, 0.95))) },
    ],
  },
  {
    title: "Tokens a second",
    write: number,
    lines: [
      { name: "written", value: inWindow((window) => rate(window, "vllm:generation_tokens_total")) },
      { name: "read", value: inWindow((window) => rate(window, "vllm:prompt_tokens_total")) },
    ],
  },
  {
    title: "KV cache",
    write: percent,
    most: 100,
    lines: [
      { name: "in use", value: (window, sample) => 100 * total(sample.values, "vllm:kv_cache_usage_perc") },
      { name: "prefix hits", value: share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total") },
    ],
  },
  {
    title: "Pictures a second",
    write: number,
    lines: [
      { name: "pictures", value: inWindow((window) => rate(window, "beholder_images_total")) },
      {
        name: "cache hits",
        value: share("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
        write: percent,
        apart: true,
      },
    ],
  },
  {
    title: "Live frames a second",
    write: number,
    lines: [
      { name: "sent", value: inWindow((window) => rate(window, "beholder_stream_frames_received_total")) },
      {
        name: "described",
        value: inWindow((window) => rate(window, "beholder_stream_frames_total", { outcome: "captioned" })),
      },
      { name: "sessions", value: gauge("beholder_stream_sessions", { state: "connected" }), apart: true },
    ],
  },
  {
    title: "Answers a second",
    write: number,
    lines: [
      { name: "finished", value: inWindow((window) => finished(window, "stop", "length")) },
      { name: "cut or failed", value: inWindow((window) => finished(window, "abort", "error")) },
    ],
  },
];

/** Where the time of a request goes, in milliseconds: [name, value(window)]. */
export const STAGES = [
  ["decode pictures", (window) => times1000(mean(window, "beholder_image_decode_seconds"))],
  ["resize, tokenise", (window) => rest(mean(window, "beholder_preprocess_seconds"), mean(window, "beholder_image_decode_seconds"))],
  ["wait", (window) => times1000(mean(window, "vllm:request_queue_time_seconds"))],
  ["see", (window) => times1000(mean(window, "beholder_vision_encode_seconds"))],
  ["read", (window) => times1000(mean(window, "vllm:request_prefill_time_seconds"))],
  ["write", (window) => times1000(mean(window, "vllm:request_decode_time_seconds"))],
];

/** What has gone wrong since the server started: [what, how often]. */
export function troubles(values) {
  const found = [];
  for (const { labels, value } of values.get("beholder_requests_refused_total") ?? []) {
    if (value) found.push([`requests refused: ${labels.code}`, value]);
  }
  for (const { labels, value } of values.get("beholder_child_deaths_total") ?? []) {
    if (value) found.push([`restarts of the ${labels.role} process`, value]);
  }
  const retracted = total(values, "vllm:num_preemptions_total");
  if (retracted) found.push(["answers set back because memory ran out", retracted]);
  return found.sort((one, other) => other[1] - one[1]);
}

export { milliseconds };

const times1000 = (seconds) => (seconds === null ? null : seconds * 1e3);
const rest = (whole, part) => (whole === null ? null : Math.max(whole - (part ?? 0), 0) * 1e3);
const finished = (window, ...reasons) =>
  reasons.reduce((sum, reason) => sum + rate(window, "vllm:request_success_total", { finished_reason: reason }), 0);
