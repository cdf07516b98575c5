// What the server does for a model, looked at once a second: charts, and a table of the same figures.

import { ApiError, ask } from "./api.js";
import { Chart } from "./charts.js";
import { element } from "./dom.js";
import { gauge, mean, quantile, rate, readMetrics } from "./metrics.js";

const PERIOD_MS = 1000;
const SHOWN = 120; // values of a chart
const WINDOW = 5; // periods that a rate or a mean is taken over

const tokens = (value) => `${value.toFixed(value < 10 ? 1 : 0)} tokens/s`;
const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const percent = (value) => `${(value * 100).toFixed(value < 1 ? 1 : 0)} %`;
const count = (value) => value.toFixed(Number.isInteger(value) ? 0 : 1);

const latencies = (name) => [
  { name: "mean", figure: (before, now) => mean(before, now, name) },
  { name: "95th percentile", figure: (before, now) => quantile(before, now, name, 0.95) },
];

const CHARTS = [
  {
    title: "Throughput",
    format: tokens,
    series: [
      { name: "generated", figure: (before, now) => rate(before, now, "generation_tokens_total") },
      { name: "prompt", figure: (before, now) => rate(before, now, "prompt_tokens_total") },
    ],
  },
  { title: "Time to first token", format: seconds, series: latencies("time_to_first_token_seconds") },
  { title: "Inter-token latency", format: seconds, series: latencies("inter_token_latency_seconds") },
  {
    title: "KV cache",
    format: percent,
    most: 1,
    series: [{ name: "in use", figure: (_, now) => gauge(now, "kv_cache_usage_perc") }],
  },
  {
    title: "Batch and queue",
    format: count,
    series: [
      { name: "running", figure: (_, now) => gauge(now, "num_requests_running") },
      { name: "waiting", figure: (_, now) => gauge(now, "num_requests_waiting") },
    ],
  },
];

export class Load {
  #timer = null;

  /**
   * @param {HTMLDetailsElement} panel No requests are sent while it is closed.
   * @param {{charts: Element, figures: Element, error: Element}} places
   */
  constructor(panel, places) {
    this.panel = panel;
    this.places = places;
    this.charts = CHARTS.map(({ title, format, series }) => new Chart(title, format, series.map(({ name }) => name)));
    places.charts.replaceChildren(...this.charts.map(({ figure }) => figure));
  }

  /** Starts again with another model or key. */
  watch(model) {
    clearTimeout(this.#timer);
    this.model = model;
    this.looks = [];
    this.values = CHARTS.map(({ series }) => series.map(() => []));
    this.#poll(model);
  }

  async #poll(model) {
    if (this.panel.open && !document.hidden) {
      try {
        const text = await (await ask("metrics")).text();
        if (model !== this.model) return; // another one is watched meanwhile
        this.#take(readMetrics(text, model, performance.now() / 1000));
        this.places.error.textContent = "";
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.places.error.textContent = error.message;
        if (error.status === 401) return; // until there is a key
      }
    }
    this.#timer = setTimeout(() => this.#poll(model), PERIOD_MS);
  }

  #take(look) {
    const last = this.looks.at(-1);
    const hasGap = last && look.timeS - last.timeS > (WINDOW * PERIOD_MS) / 1000;
    if (hasGap) this.looks = [];
    this.looks = [...this.looks, look].slice(-WINDOW - 1);
    const before = this.looks.length > 1 ? this.looks[0] : null;
    CHARTS.forEach(({ series, most }, place) => {
      const shown = series.map(({ name, figure }, which) => {
        const added = [before && figure(before, look)];
        if (hasGap) added.unshift(null);
        const values = [...this.values[place][which], ...added].slice(-SHOWN);
        this.values[place][which] = values;
        return { name, values };
      });
      this.charts[place].show(shown, SHOWN, most);
    });
    this.#showTable();
  }

  #showTable() {
    const rows = CHARTS.flatMap(({ title, format, series }, place) =>
      series.map(({ name }, which) => {
        const values = this.values[place][which];
        const known = values.filter((value) => value !== null);
        const average = known.reduce((sum, value) => sum + value, 0) / known.length;
        const figures = [values.at(-1), ...(known.length ? [average, Math.max(...known)] : [null, null])];
        const cells = figures.map((value) => element("td", {}, value === null ? "–" : format(value)));
        return element("tr", {}, element("th", { scope: "row" }, `${title}, ${name}`), ...cells);
      }),
    );
    this.places.figures.replaceChildren(...rows);
  }
}
