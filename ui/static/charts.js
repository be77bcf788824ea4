// Small charts over time, drawn as SVG. Lines break where nothing is known; the newest is at the right.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 64;

/** A chart of up to three lines, which stretches to the width of its place. */
export class Chart {
  #lines;
  #area;

  /**
   * @param numLines the first is drawn with an area below it
   */
  constructor(numLines) {
    this.element = document.createElementNS(SVG, "svg");
    set(this.element, { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "chart" });
    this.#area = path("chart-area");
    this.#lines = Array.from({ length: numLines }, (_, index) => path(`chart-line line-${index + 1}`));
    this.element.append(line(HEIGHT - 0.5), this.#area, ...this.#lines.toReversed());
  }

  /**
   * Draws.
   * @param series for each line [{timeS, value}], value null where nothing is known
   * @param nowS   the right edge
   * @param spanS  how many seconds it shows
   * @param most   top of the scale, or 0: the largest value
   * @param label  what a person who does not see it is told
   */
  draw(series, nowS, spanS, most, label) {
    const top = Math.max(most, 1e-9, ...(most ? [] : series.flat().map(({ value }) => value ?? 0))) * (most ? 1 : 1.08);
    const place = ({ timeS, value }) => [
      WIDTH * (1 - (nowS - timeS) / spanS),
      HEIGHT - 1 - (HEIGHT - 3) * Math.min(Math.max(value / top, 0), 1),
    ];
    const runs = series.map((points) => split(points).map((run) => run.map(place)));
    this.#lines.forEach((element, index) => set(element, { d: runs[index].map(polyline).join("") }));
    set(this.#area, { d: runs[0].map(below).join("") });
    set(this.element, { "aria-label": label });
  }
}

// Runs of points between which something is known.
function split(points) {
  const runs = [];
  let run = null;
  for (const point of points) {
    if (point.value === null) run = null;
    else if (run) run.push(point);
    else runs.push((run = [point]));
  }
  return runs;
}

const polyline = (run) =>
  run.length === 1 ? `M${at(run[0])}h1.5` : `M${run.map(at).join("L")}`;
const below = (run) => `M${run[0][0].toFixed(1)} ${HEIGHT}L${run.map(at).join("L")}L${run.at(-1)[0].toFixed(1)} ${HEIGHT}Z`;
const at = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function path(name) {
  const element = document.createElementNS(SVG, "path");
  set(element, { class: name, "vector-effect": "non-scaling-stroke" });
  return element;
}

function line(y) {
  const element = document.createElementNS(SVG, "path");
  set(element, { class: "chart-floor", d: `M0 ${y}H${WIDTH}`, "vector-effect": "non-scaling-stroke" });
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}
