// The tab Engine: how the server does at the moment and did over the last minutes, from `/metrics`; what it is set to;
// and what its model says of itself. Looks every second while it can be seen.

import { call, get } from "./api.js";
import { Chart } from "./charts.js";
import { FIGURES, STAGES, milliseconds, troubles } from "./figures.js";
import { markdown } from "./markdown.js";
import { Samples, parse, total } from "./metrics.js";

const LOOK_EVERY_MS = 1000;
const PATIENCE_MS = 3000;
const LOOK_UNSEEN_MS = 5000; // another tab is open: keep the lines going
const SPAN_S = 300;
const LEAST_SPAN_S = 60; // of a page that was just opened
const WINDOW_S = 30;

const PAGE = `
  <div class="engine">
    <header class="engine-head"><h2 class="engine-state">Looking …</h2><p class="engine-about"></p></header>
    <p class="unseen" role="status"></p>
    <div class="engine-figures"></div>
    <section class="engine-stages"><h3>Where the time of a request goes</h3>
      <div class="stage-bar" role="img"></div><dl></dl></section>
    <section class="engine-troubles"><h3>Since the start</h3><div>…</div></section>
    <details class="engine-card"><summary>Model card</summary><div></div></details>
    <details class="engine-options"><summary>Limits and options</summary><div></div></details>
    <p class="engine-foot">Lines cover up to five minutes, numbers the last ${WINDOW_S} seconds.
      The same for Prometheus: <a href="${new URL("../../metrics", import.meta.url)}">/metrics</a>.</p>
  </div>`;

class Engine extends HTMLElement {
  #samples = new Samples(SPAN_S + WINDOW_S);
  #figures = [];
  #timer = 0;
  #awaySince = null;
  #about = ""; // model and version

  connectedCallback() {
    this.innerHTML = PAGE;
    this.#figures = FIGURES.map((figure) => new Figure(figure));
    this.querySelector(".engine-figures").append(...this.#figures.map(({ element }) => element));
    this.#drawStages(null);
    document.addEventListener("visibilitychange", this.#onVisible);
    this.#tellAbout();
    this.#look();
  }

  disconnectedCallback() {
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#onVisible);
  }

  #onVisible = () => {
    if (!document.hidden) this.#look();
  };

  async #look() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    let values = null;
    try {
      values = parse(await (await call("/metrics", { signal: AbortSignal.timeout(PATIENCE_MS) })).text());
    } catch (error) {
      this.#sayAway((this.#awaySince ??= new Date()), error);
    }
    if (!this.isConnected) return;
    this.#samples.add(performance.now() / 1e3, values);
    if (values) {
      if (this.#awaySince) this.#tellAbout(); // it may be another version now
      this.#awaySince = null;
      this.#sayState(values);
    }
    if (this.checkVisibility()) this.#draw();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), this.checkVisibility() ? LOOK_EVERY_MS : LOOK_UNSEEN_MS);
  }

  #sayState(values) {
    const running = total(values, "vllm:num_requests_running");
    const waiting = total(values, "vllm:num_requests_waiting");
    const upS = Date.now() / 1e3 - total(values, "beholder_start_time_seconds");
    const state = !total(values, "beholder_ready") ? "Not ready" : running + waiting ? "At work" : "Ready";
    this.#say(state, `up ${duration(upS)}`);
  }

  #sayAway(since, { status, message }) {
    const time = since.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
    // It answers, but not with this; or it does not answer.
    this.#say("No answer", `since ${time}`, status ? message : "It may be restarting; this page goes on by itself.");
  }

  #say(state, more, advice = "") {
    this.querySelector(".engine-about").textContent = advice || this.#about;
    const head = this.querySelector(".engine-state");
    this.querySelector(".engine").dataset.state = state.toLowerCase().replace(" ", "-");
    if (head.dataset.state !== state && (state === "No answer" || head.dataset.state === "No answer")) {
      this.querySelector("[role=status]").textContent = `${state} ${more}. ${advice}`;
    }
    head.dataset.state = state;
    head.textContent = state;
    head.append(Object.assign(document.createElement("span"), { textContent: ` · ${more}` }));
  }

  #draw() {
    const nowS = performance.now() / 1e3;
    for (const figure of this.#figures) figure.draw(this.#samples, nowS);
    const window = this.#samples.window(WINDOW_S);
    this.#drawStages(window);
    const values = this.#samples.last?.values;
    if (values) this.#drawTroubles(troubles(values));
  }

  #drawStages(window) {
    const stages = STAGES.map(([name, value]) => [name, (window && value(window)) ?? 0]);
    const whole = stages.reduce((sum, [, value]) => sum + value, 0);
    const bar = this.querySelector(".stage-bar");
    const list = this.querySelector(".engine-stages dl");
    bar.replaceChildren();
    list.replaceChildren();
    stages.forEach(([name, value], index) => {
      const part = document.createElement("span");
      part.style.flexGrow = whole ? value / whole : 0;
      part.dataset.stage = index;
      bar.append(part);
      const row = document.createElement("div");
      row.dataset.stage = index;
      row.append(
        Object.assign(document.createElement("dt"), { textContent: name }),
        Object.assign(document.createElement("dd"), { textContent: whole ? milliseconds(value) : "–" }),
      );
      list.append(row);
    });
    bar.setAttribute(
      "aria-label",
      whole ? stages.map(([name, value]) => `${name} ${milliseconds(value)}`).join(", ") : "no request in the last half minute",
    );
  }

  #drawTroubles(found) {
    const place = this.querySelector(".engine-troubles div");
    if (!found.length) {
      place.textContent = "Nothing has gone wrong.";
      return;
    }
    const list = document.createElement("dl");
    for (const [what, count] of found) {
      const row = document.createElement("div");
      row.append(
        Object.assign(document.createElement("dt"), { textContent: what }),
        Object.assign(document.createElement("dd"), { textContent: count.toLocaleString("en") }),
      );
      list.append(row);
    }
    place.replaceChildren(list);
  }

  async #tellAbout() {
    try {
      const about = await get("/v1/server");
      this.#about = `${about.models.join(", ")} on Beholder ${about.version}`;
      if (!this.#awaySince) this.querySelector(".engine-about").textContent = this.#about;
      this.querySelector(".engine-options div").replaceChildren(optionTable(about.options));
      const card = await call("/v1/card");
      this.querySelector(".engine-card div").replaceChildren(markdown(await card.text()));
    } catch (error) {
      const place = this.querySelector(".engine-card div");
      if (!place.childElementCount) place.textContent = error.message;
    }
  }
}

/** One figure: its newest numbers, and their lines. */
class Figure {
  #figure;
  #numbers;
  #chart;
  #scale;

  constructor(figure) {
    this.#figure = figure;
    this.#chart = new Chart(figure.lines.filter((line) => !line.apart).length);
    this.element = document.createElement("section");
    this.element.className = "engine-figure";
    const title = Object.assign(document.createElement("h3"), { textContent: figure.title });
    const list = document.createElement("dl");
    this.#numbers = figure.lines.map((line, index) => {
      const row = document.createElement("div");
      row.className = line.apart ? "apart" : `line-${index + 1}`;
      const number = Object.assign(document.createElement("dd"), { textContent: "–" }); // its room from the beginning
      row.append(number, Object.assign(document.createElement("dt"), { textContent: line.name }));
      list.append(row);
      return number;
    });
    this.#scale = document.createElement("p");
    this.#scale.className = "chart-scale";
    this.#scale.ariaHidden = "true"; // the chart's name says it
    this.#scale.append(...[1, 2].map(() => Object.assign(document.createElement("span"), { textContent: "\u00a0" })));
    this.element.append(title, list, this.#scale, this.#chart.element);
  }

  draw(samples, nowS) {
    const { lines, most = 0, title } = this.#figure;
    const newest = samples.all.length - 1;
    const said = lines.map((line, index) => {
      const sample = samples.all[newest];
      const value = sample?.values ? line.value(samples.window(WINDOW_S), sample) : null;
      const words = value === null ? "–" : (line.write ?? this.#figure.write)(value);
      this.#numbers[index].textContent = words;
      return `${line.name} ${words}`;
    });
    const series = lines
      .filter((line) => !line.apart)
      .map((line) =>
        samples.all.map((sample, index) => ({
          timeS: sample.timeS,
          value: sample.values ? line.value(samples.window(WINDOW_S, index), sample) : null,
        })),
      );
    const spanS = Math.min(Math.max(nowS - samples.all[0].timeS, LEAST_SPAN_S), SPAN_S);
    const seen = series.flat().map(({ value }) => value).filter((value) => value !== null);
    const peak = seen.length ? `peak ${this.#figure.write(Math.max(...seen))}` : "";
    const span = spanS < 120 ? `${Math.round(spanS)} s` : `${Math.floor(spanS / 60)} min`;
    [this.#scale.firstChild.textContent, this.#scale.lastChild.textContent] = [`last ${span}`, peak];
    const label = [`${title} over the last ${span}`, `now ${said.join(", ")}`, peak].filter(Boolean).join("; ");
    this.#chart.draw(series, nowS, spanS, most, label);
  }
}

function optionTable(options) {
  const scroller = document.createElement("div");
  scroller.className = "card-table";
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "group");
  scroller.setAttribute("aria-label", "Options of this server");
  const table = document.createElement("table");
  for (const { name, value, unit, help } of options) {
    const row = document.createElement("tr");
    const shown = typeof value === "number" ? value.toLocaleString("en") : String(value);
    row.append(
      Object.assign(document.createElement("th"), { textContent: `--${name.replaceAll("_", "-")}`, scope: "row" }),
      Object.assign(document.createElement("td"), { textContent: unit ? `${shown} ${unit}` : shown }),
      Object.assign(document.createElement("td"), { textContent: help }),
    );
    table.append(row);
  }
  scroller.append(table);
  return scroller;
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.max(Math.round(seconds), 0)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

customElements.define("beholder-engine", Engine);
