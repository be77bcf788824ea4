// What was seen, as files: JSON Lines, CSV and WebVTT. Pure functions of the entries of `live_history.js`.

const COLUMNS = [
  "time",
  "until",
  "times",
  "text",
  "prompt",
  "model",
  "starred",
  "rating",
  "frame_age_ms",
  "ttft_ms",
  "tokens_per_s",
  "vision_tokens",
  "cached_tokens",
  "output_tokens",
  "response_id",
];

const row = (entry) => ({
  time: new Date(entry.firstAt).toISOString(),
  until: new Date(entry.lastAt).toISOString(),
  times: entry.times,
  text: entry.text,
  prompt: entry.prompt,
  model: entry.model,
  starred: entry.starred,
  rating: entry.rating,
  frame_age_ms: entry.figures.ageMs,
  ttft_ms: entry.figures.ttftMs,
  tokens_per_s: entry.figures.tokensPerS,
  vision_tokens: entry.figures.visionTokens,
  cached_tokens: entry.figures.cachedTokens,
  output_tokens: entry.figures.outputTokens,
  response_id: entry.responseId,
});

/** One JSON object a line. */
export const jsonl = (entries) => entries.map((entry) => JSON.stringify(row(entry)) + "\n").join("");

/** RFC 4180. A spreadsheet must not take what a model read somewhere for a formula. */
export function csv(entries) {
  const cell = (value) => {
    let text = String(value ?? "");
    if (typeof value === "string" && /^\s*[=+\-@＝＋－＠]|^[\t\r\n]/.test(text)) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = entries.map(row).map((each) => COLUMNS.map((column) => cell(each[column])).join(","));
  return [COLUMNS.join(","), ...lines, ""].join("\r\n");
}

/** Subtitles, as words for people, for a recording that began with the first entry: each is shown until the next. */
export function vtt(entries) {
  const ordered = entries.toSorted((one, other) => one.firstAt - other.firstAt); // clocks may be set back
  const zero = ordered[0]?.firstAt ?? 0;
  const cues = ordered.map((entry, index) => {
    const start = entry.firstAt - zero;
    const end = Math.max(start + 500, (ordered[index + 1]?.firstAt ?? entry.lastAt + 3000) - zero);
    return `${stamp(start)} --> ${stamp(end)}\n${cueText(entry.shown)}\n`;
  });
  return ["WEBVTT\n", ...cues].join("\n");
}

// An empty line would end the cue, and an arrow make its line the next one's time.
function cueText(text) {
  const lines = text.split(/[\r\n]+/).filter((line) => line.trim());
  const escaped = lines.join("\n").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return escaped.trim() || " ";
}

function stamp(ms) {
  const part = (value, width = 2) => String(Math.floor(value)).padStart(width, "0");
  return `${part(ms / 3_600_000)}:${part((ms / 60_000) % 60)}:${part((ms / 1000) % 60)}.${part(ms % 1000, 3)}`;
}

/** Hands a text to the visitor as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
