// What `/metrics` said over the last minutes: samples of Prometheus text, and the numbers that people ask of them.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Prometheus text → Map of name to [{labels, value}]. */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return families;
}

/** Samples, oldest first. One without `values` is a moment at which the server did not answer. */
export class Samples {
  #kept = [];
  #spanS;

  /** @param spanS how far back samples are kept */
  constructor(spanS) {
    this.#spanS = spanS;
  }

  /** Adds what was read at `timeS`; null when there was no answer. */
  add(timeS, values) {
    const last = this.last;
    const restarted = last && values && total(last.values, START) !== total(values, START);
    this.#kept.push({ timeS, values, isFirst: !last || restarted });
    while (this.#kept[0].timeS < timeS - this.#spanS) this.#kept.shift();
  }

  get all() {
    return this.#kept;
  }

  /** The newest answer, or undefined. */
  get last() {
    return this.#kept.findLast((sample) => sample.values);
  }

  /** [older, newer] samples `windowS` apart (or as far as there are), ending at `end`; null across a restart or a gap. */
  window(windowS, end = this.#kept.length - 1) {
    const newer = this.#kept[end];
    if (!newer?.values || newer.isFirst) return null;
    let start = end;
    while (start > 0 && !this.#kept[start].isFirst && this.#kept[start - 1].values) {
      start -= 1;
      if (this.#kept[start].timeS <= newer.timeS - windowS) break;
    }
    return start === end ? null : [this.#kept[start], newer];
  }
}

const START = "beholder_start_time_seconds";

/** The sum of a metric over its series, or over those with these labels. */
export function total(values, name, labels = {}) {
  return (values.get(name) ?? [])
    .filter((series) => Object.entries(labels).every(([key, value]) => series.labels[key] === value))
    .reduce((sum, series) => sum + series.value, 0);
}

/** How much a counter grew in a window. */
export const growth = ([older, newer], name, labels) => total(newer.values, name, labels) - total(older.values, name, labels);

/** How much it grew a second. */
export const rate = (window, name, labels) => growth(window, name, labels) / (window[1].timeS - window[0].timeS);

/** The mean of what a histogram saw in a window, or null when that is nothing. */
export function mean(window, name) {
  const count = growth(window, `${name}_count`);
  return count ? growth(window, `${name}_sum`) / count : null;
}

/**
 * A percentile of what a histogram saw in a window, in its unit, or null when that is nothing. Within a bucket values are
 * taken to be spread evenly, as Prometheus' histogram_quantile does.
 */
export function percentile(window, name, share) {
  const bounds = new Map();
  for (const { labels, value } of window[1].values.get(`${name}_bucket`) ?? []) {
    bounds.set(labels.le, (bounds.get(labels.le) ?? 0) + value);
  }
  for (const { labels, value } of window[0].values.get(`${name}_bucket`) ?? []) {
    bounds.set(labels.le, (bounds.get(labels.le) ?? 0) - value);
  }
  const buckets = [...bounds].map(([le, count]) => [Number(le.replace("+Inf", "Infinity")), count]).sort((a, b) => a[0] - b[0]);
  const all = buckets.at(-1)?.[1] ?? 0;
  if (!all) return null;
  const wanted = share * all;
  let [low, below] = [0, 0];
  for (const [high, count] of buckets) {
    if (count >= wanted) {
      if (high === Infinity) return low;
      return count === below ? high : low + ((high - low) * (wanted - below)) / (count - below);
    }
    [low, below] = [high, count];
  }
  return low;
}
